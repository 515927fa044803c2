"""An exporter as the weight source that vLLM's own trainer engines take: the shape of theirs, not their class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from .exporter import Exporter
from .lockstep import on_stream

__all__ = ["ParamMeta", "WeightSource"]


@dataclass(frozen=True)
class ParamMeta:
    """What a tensor is called and how large it is.

    Attributes:
        name: Its name in the checkpoint.
        dtype: The dtype in which it is sent.
        shape: Its whole shape.
        owners: None: it comes on every rank.
        mesh_shape: None, and so is `placements`: it comes whole.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: None = None
    mesh_shape: None = None
    placements: None = None


class _Metadata(list[ParamMeta]):
    """A list that returns itself when it is called: `metadata` was a method until vLLM 0.31."""

    def __call__(self) -> _Metadata:
        return self


class WeightSource:
    """Hands the tensors of an exporter to vLLM's trainer engines (0.28 or later): `source=WeightSource(exporter)`.

    Unlike vLLM's own source of a module it brings buffers, the names and dtypes of the checkpoint, merged LoRA and
    modules whose parameters are on the host. A tensor is gathered before it is handed over, whatever waits on the
    stream of the consumer, and no rank gathers more than a bucket ahead of another one.

    Args:
        exporter: Made on every rank; all of its choices hold.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    @cached_property
    def metadata(self) -> _Metadata:
        """All tensors in the order in which they come. Local, and nothing is gathered."""
        plan = self._exporter.plan.in_order_of_delivery(self._exporter.bucket_bytes)
        return _Metadata(ParamMeta(info.name, info.dtype, tuple(info.shape)) for info in plan.outputs)

    def owned_names(self, rank: int) -> list[str]:
        """Return the names of the tensors that a rank gets: all."""
        return [meta.name for meta in self.metadata]

    def implements_iter_full(self) -> bool:
        """Tell that whole tensors can be had."""
        return True

    def implements_iter_local(self) -> bool:
        """Tell that shards cannot be had."""
        return False

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whole. Collective: every rank must drain this.

        A consumer may change its stream from one tensor to the next. Ours is always the same, and starts where the
        default stream is, on which models are trained; each tensor is ready on the stream that is current when it is
        asked for.

        Raises:
            ExportError: As `Exporter.send`.
        """
        device = self._exporter.source.device
        stream = _own_stream(device)
        generator: Any = self._exporter.tensors()
        with closing(generator) as tensors:
            while True:
                with on_stream(stream):
                    item = next(tensors, None)
                if item is None:
                    return
                if stream is not None:
                    consumer = torch.get_device_module(device).current_stream(device)
                    consumer.wait_stream(stream)
                    item[1].record_stream(consumer)
                yield item
                del item

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full()


def _own_stream(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    module, stream = torch.get_device_module(device), _stream(device)
    stream.wait_stream(module.default_stream(device))
    stream.wait_stream(module.current_stream(device))
    return stream


@cache
def _stream(device: torch.device) -> Any:
    """Return a stream of a device, always the same: the allocator would keep every other one's memory as well."""
    return torch.get_device_module(device).Stream(device)
