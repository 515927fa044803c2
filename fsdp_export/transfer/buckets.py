"""Whole tensors laid one after the other into buckets of bytes, planned before the first one is gathered.

Engines join some tensors that come in one bucket (the projections of attention, gate and up, a weight and its scale),
and some of them do so only then: what belongs to one module and comes without a break is never split between two
buckets. What does not is the experts of several fused tensors, which no engine joins (gate and up come as one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..memory import bytes_of
from ..spec import TensorInfo

__all__ = ["Bucket", "BucketLayout", "Entry", "Packer", "lay_out", "new_buffer"]

BufferOf = Callable[[int, torch.device], torch.Tensor]
"""Gives a buffer of at least so many bytes, uint8 and flat, on a device, which is free to be written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is in a bucket.

    Attributes:
        info: Its name, shape and dtype.
        offset: Its first byte in the bucket.
    """

    info: TensorInfo
    offset: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What lies where in a bucket.

    Attributes:
        entries: In the order of their bytes.
        num_bytes: Bytes of the bucket.
    """

    entries: tuple[Entry, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some whole tensors as bytes.

    Attributes:
        buffer: The bytes, uint8, flat, on the device.
        entries: Which tensors lie where, in the order of their bytes.
    """

    buffer: torch.Tensor
    entries: tuple[Entry, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors under their names, as views of the buffer."""
        for entry in self.entries:
            flat = self.buffer[entry.offset : entry.offset + entry.info.num_bytes]
            yield entry.info.name, flat.view(entry.info.dtype).view(entry.info.shape)


def lay_out(infos: Iterable[TensorInfo], max_bytes: int, *, align: int = 1) -> list[BucketLayout]:
    """Plan buckets.

    In a bucket wider dtypes come first, so that every tensor begins at a multiple of its element size even where
    nothing lies between two of them.

    Args:
        infos: The tensors in the order in which they will come.
        max_bytes: Bytes of a bucket; what must not be split and takes more gets a larger one of its own.
        align: Tensors begin at multiples of this many bytes.
    """
    buckets: list[list[TensorInfo]] = []
    room = 0
    for _, members in groupby(infos, key=lambda info: _owner(info.name)):
        group = list(members)
        num_bytes = sum(_rounded(info.num_bytes, align) for info in group)
        if not buckets or num_bytes > room:
            buckets.append([])
            room = max_bytes
        buckets[-1] += group
        room -= num_bytes
    return [_layout(bucket, align) for bucket in buckets]


def _owner(name: str) -> str:
    """Return the module whose submodules an engine may join: `a.b.attn` for `a.b.attn.q_proj.weight`."""
    return name.rsplit(".", 2)[0]


def _layout(infos: Iterable[TensorInfo], align: int) -> BucketLayout:
    entries, offset = [], 0
    for info in sorted(infos, key=lambda info: -info.dtype.itemsize):
        offset = _rounded(offset, align)
        entries.append(Entry(info, offset))
        offset += info.num_bytes
    return BucketLayout(tuple(entries), offset)


def _rounded(num_bytes: int, align: int) -> int:
    return -(-num_bytes // align) * align


def new_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for buckets, uint8 and flat."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Packer:
    """Copies tensors into the buckets that were planned for them, as they come.

    Args:
        layouts: The buckets, for the tensors in the order in which they come.
        buffer_of: Gives the buffer of the next bucket, when its first tensor comes.
    """

    def __init__(self, layouts: Sequence[BucketLayout], buffer_of: BufferOf) -> None:
        self._layouts = iter(layouts)
        self._buffer_of = buffer_of
        self._bucket: Bucket | None = None
        self._offsets: dict[str, int] = {}

    def add(self, info: TensorInfo, tensor: torch.Tensor) -> Bucket | None:
        """Copy a tensor to its place, on the current stream; return the bucket if that was the last one in it."""
        if self._bucket is None:
            layout = next(self._layouts)
            self._offsets = {entry.info.name: entry.offset for entry in layout.entries}
            buffer = self._buffer_of(layout.num_bytes, tensor.device)
            self._bucket = Bucket(buffer[: layout.num_bytes], layout.entries)
        begin = self._offsets.pop(info.name)
        self._bucket.buffer[begin : begin + info.num_bytes].copy_(bytes_of(tensor))
        if self._offsets:
            return None
        full, self._bucket = self._bucket, None
        return full
