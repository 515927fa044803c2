"""One exporter for everything: files, engines and your own loop are three ends of the same walk."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .agreement import agree_on_plan, check_copies
from .conversion.lora_view import LoraView
from .dtype_notes import dtype_notes, live_dtypes
from .dtypes import DtypePolicy
from .errors import UsageError
from .fence import Fence, Operation
from .plan import Plan
from .planning import Planning
from .sidecars.lora import live_lora_sidecars
from .sidecars.of_model import from_model, has_config
from .sidecars.sidecar import Sidecars
from .sinks.base import Delivery, Sink
from .sinks.huggingface import Report, folder_sink
from .sources.base import Source
from .sources.live import find_ranks
from .walk import Delivered, gathered_pieces, run

__all__ = ["Exporter"]

# Each costs about a millisecond more, a fence and Python, in which NVLink gathers 512 MiB. On the CPU larger ones gain
# nothing, and are host memory.
_BUCKET_BYTES = 1 << 30
_CPU_BUCKET_BYTES = 32 << 20


class Exporter:
    """Delivers the tensors of a sharded module, bucket by bucket, without moving or changing it.

    Making one is local and free; the plan is made at the first use and reused. Values are read at each use.

    Args:
        model: The module (FSDP2, DDP or plain), or a `Source`.
        state_dict: Other values under the module's names, for example an EMA: DTensors, or local tensors of the
            shapes of the module's own local tensors. A missing or misshapen one is an error.
        dtype: What floating tensors are cast to: `"keep"`, a torch dtype or its name. Parameters that a class of
            transformers keeps in float32 are not cast to half of it.
        keep_dtype: Patterns of names of the checkpoint whose tensors are not cast at all.
        include: Patterns of names to export; see `fsdp_export.names.matching`.
        exclude: Patterns of names to leave out.
        adapter: Turns the module's names and tensors into those of the checkpoint: an object with
            `to_hf(state_dict)` or `convert_single_tensor_to_hf(name, tensor)`, such as torchtitan's. It must not look
            at values, and make the same of a few tensors as of all. Patterns and dtypes are of what it makes. Without
            one, names and tensors of a model of transformers become those that `save_pretrained` writes.
        lora: What becomes of a PEFT model: `"merge"`, the base model with all active adapters in its weights;
            `"adapter"`, the active adapter alone under PEFT's names; `"keep"`, all tensors under the names that they
            have; `"auto"` is `"merge"`. For a `Source`: a `LoraView`. Without effect on other models.
        aliases: For a `Source`: names to leave out, and the name that stands for each.
        untied: For a `Source`: names that count as tied but are exported since their values differ.
        in_fp32: For a `Source`: names of the checkpoint whose tensors are not cast to half of float32.
        device: Where tensors are gathered; default: this rank's device of the mesh.
        bucket_bytes: Bytes gathered at a time; at most two buckets are alive. Default: 1 GiB, 32 MiB on the CPU.
        timeout: Seconds to wait for a rank that does not call.

    Raises:
        UsageError: `dtype` is none, `model` no module, or `bucket_bytes` not positive.
    """

    def __init__(
        self,
        model: nn.Module | Source,
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        dtype: str | torch.dtype | DtypePolicy = "keep",
        keep_dtype: Sequence[str] = (),
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        adapter: Any = None,
        lora: str | LoraView = "auto",
        aliases: Mapping[str, str] | None = None,
        untied: Sequence[str] = (),
        in_fp32: Collection[str] = (),
        device: torch.device | str | None = None,
        bucket_bytes: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        if not isinstance(model, nn.Module) and not hasattr(model, "specs"):
            raise UsageError("nothing to export", expected="a torch.nn.Module", found=type(model).__name__)
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise UsageError("a bucket of no size", expected="a positive number of bytes", found=bucket_bytes)
        if isinstance(lora, str) and lora not in {"auto", "merge", "adapter", "keep"}:
            raise UsageError("no such choice for LoRA", expected="auto, merge, adapter or keep", found=lora)
        self._planning = Planning(
            model,
            state_dict=state_dict,
            dtype=DtypePolicy.parse(dtype),
            keep_dtype=keep_dtype,
            include=include,
            exclude=exclude,
            adapter=adapter,
            lora=lora,
            aliases=aliases or {},
            untied=untied,
            in_fp32=in_fp32,
            device=torch.device(device) if device is not None else None,
        )
        self._model, self._bucket_bytes = model, bucket_bytes
        ranks, rank = find_ranks(model) if isinstance(model, nn.Module) else (model.ranks, model.rank)
        self._fence = Fence(ranks, rank, timeout=timeout)

    @property
    def source(self) -> Source:
        """What is exported. Local; raises what cannot be exported (`SourceError`, `UsageError`)."""
        return self._planning.source

    @property
    def plan(self) -> Plan:
        """Names, shapes and dtypes that will be delivered; prints as a table. Local, and nothing is gathered.

        Where a module has two parameters for one that its config declares tied, both count until an export compares
        them.
        """
        return self._planning.plan

    @property
    def pattern_hits(self) -> dict[str, int]:
        """How many names each pattern matched, of `num_available`; once there is a plan."""
        return self._planning.pattern_hits

    @property
    def num_available(self) -> int:
        """How many names there are to choose from; once there is a plan."""
        return self._planning.num_available

    def provenance(self) -> dict[str, object]:
        """Return what the record of an export says of its source and of the choices made here. Local."""
        return self._planning.provenance()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whole, as `(name, tensor)`, in the order of the plan's steps, on the device.

        The experts of a fused tensor come a bucket at a time, and never all of it is held.

        Collective: every rank must drain this, and ranks with several exporters must use them in the same order. A
        rank that leaves early ends it: the others raise. The tensors belong to the consumer. Peak device memory: two
        buckets and what the consumer keeps.

        Raises:
            ExportError: As `send`.
        """
        with self._fence.operation("Exporter.tensors") as operation, closing(self.source) as source:
            self._prepare(operation, "everyone", gather_all=True)
            for piece in gathered_pieces(self.plan, source, operation, self.bucket_bytes):
                operation.check()
                yield piece.info.name, piece.tensor
                del piece

    def send(self, sink: Sink, *, delivered: Delivered = lambda _: None, gather_all: bool = False) -> None:
        """Deliver everything to a sink, all or nothing. Collective: every rank must call this.

        Args:
            sink: Where it goes.
            delivered: Called with the bytes that this rank has just delivered.
            gather_all: For tests: send every tensor through the device, held or not.

        Raises:
            ExportError: Something failed on some rank; the same error is raised on all.
        """
        try:
            with self._fence.operation("Exporter.send") as operation, closing(self.source) as source:
                self._prepare(operation, sink.delivery, gather_all=gather_all)
                run(
                    self.plan,
                    source,
                    sink,
                    operation,
                    bucket_bytes=self.bucket_bytes,
                    gather_all=gather_all,
                    delivered=delivered,
                )
        except BaseException:
            sink.abort()
            raise

    def save(
        self,
        path: str | PathLike[str],
        *,
        format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
        max_shard_size: int | str = "5GB",
        tokenizer: object | None = None,
        overwrite: bool = False,
        fsync: bool = True,
        delivered: Delivered = lambda _: None,
        gather_all: bool = False,
    ) -> Report:
        """Write a checkpoint folder: the old one stays until the new one is complete. Collective.

        What a rank holds it writes itself, without a gather. Peak memory: two buckets on the device for what no rank
        holds whole, and a fixed ring of host memory.

        Args:
            path: The folder. Other files in it are left alone; an earlier export of ours is replaced.
            format: `"hf"` (`model*.safetensors`, index, config, tokenizer), `"safetensors"` (one file), or `"auto"`:
                hf when the model has a config.
            max_shard_size: Bytes per file for `"hf"`, a number or decimal like `"5GB"`.
            tokenizer: A tokenizer or processor to save with the model.
            overwrite: Whether weights in the folder that we did not write may be replaced.
            fsync: Whether to return only when the disk has the bytes.
            delivered: As in `send`.
            gather_all: As in `send`.

        Returns:
            What was written; on ranks other than the first without the names of removed files.

        Raises:
            ExportError: As `send`; the earlier checkpoint is intact.
        """
        if not isinstance(self._model, nn.Module):
            raise UsageError("save() needs a module", fix="Use send() with a sink, or export_checkpoint()")
        sink = folder_sink(
            Path(path),
            format=format,
            has_config=has_config(self._planning.described),
            sidecars=self._sidecars(tokenizer),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            fsync=fsync,
            provenance=self.provenance,
            is_lora=self._planning.is_adapter,
        )
        started = time.perf_counter()
        self.send(sink, delivered=delivered, gather_all=gather_all)
        return sink.report(self.plan, time.perf_counter() - started)

    def _sidecars(self, tokenizer: object | None) -> Callable[[], Sidecars]:
        # Made in the operation: what fails there is the error of all ranks.
        return partial(self._lora_sidecars if self._planning.is_adapter else self._model_sidecars, tokenizer)

    def _lora_sidecars(self, tokenizer: object | None) -> Sidecars:
        planning = self._planning
        return live_lora_sidecars(planning.peft_config, planning.described, tokenizer=tokenizer)

    def _model_sidecars(self, tokenizer: object | None) -> Sidecars:
        model = self._planning.described
        sidecars = from_model(model, tokenizer=tokenizer)
        sidecars.warnings += dtype_notes(self.plan, live_dtypes(model, sidecars.config))
        return sidecars

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket."""
        default = _CPU_BUCKET_BYTES if self.source.device.type == "cpu" else _BUCKET_BYTES
        return self._bucket_bytes or default

    def _prepare(self, operation: Operation, delivery: Delivery, *, gather_all: bool) -> None:
        seen = self._planning.refresh(operation)
        options = f"delivery={delivery} bucket_bytes={self.bucket_bytes} gather_all={gather_all}{seen}"
        agree_on_plan(self.plan, options, operation)
        check_copies(self.plan, self.source, operation)
