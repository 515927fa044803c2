"""One exporter for everything: files, engines and your own loop are three ends of the same walk."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from .agreement import agree_on_plan, check_copies
from .conversion.lora_view import LoraView
from .dtype_notes import dtype_notes, live_dtypes
from .dtypes import DtypePolicy
from .errors import UsageError
from .fence import Fence, Operation
from .lockstep import gathered_pieces
from .pending import PendingSave, finish_latest, one_at_a_time, start, wait_for_latest, write_staged
from .plan import Plan
from .planning import Planning
from .sidecars.lora import live_lora_sidecars
from .sidecars.of_model import from_model, has_config
from .sidecars.sidecar import Sidecars
from .sidecars.tokenizers import add_tokenizer
from .sinks.base import Delivery, Sink
from .sinks.host_memory import host_memory
from .sinks.huggingface import Report, folder_sink
from .sinks.staged import StagedSink, Staging, check_staging, prepare
from .sinks.versioned import Destination, FolderPerVersion
from .sources.base import Source
from .sources.live import find_ranks
from .transfer.buckets import Bucket, Packer, lay_out, new_buffer
from .walk import Delivered, run

__all__ = ["Exporter"]

_T = TypeVar("_T")

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
        self._background = partial(Fence, ranks, rank, timeout=timeout, is_background=True)

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

    def tensors(self, *, aliases: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whole, as `(name, tensor)`, in the order of the plan's steps, on the device.

        The experts of a fused tensor come a bucket at a time, and never all of it is held; each is a view of that
        bucket's rows, which live as long as one of them. Where rows do not divide, zeros may lie behind a large tensor
        in its storage. `torch.save` writes whole storages: hand it a clone of either.

        Collective: every rank must drain this, and ranks with several exporters must use them in the same order. A
        rank that leaves early ends it: the others raise. The tensors belong to the consumer, on the stream on which it
        takes them: stay on one, and wait for it and call `record_stream` to read a tensor on another. Peak device
        memory: two buckets and what the consumer keeps.

        Args:
            aliases: Whether a tied tensor comes once more, the same one, under each of its other names.

        Raises:
            ExportError: As `send`.
        """
        with self._fence.operation("Exporter.tensors") as operation, closing(self.source) as source:
            self._prepare(operation, "everyone", gather_all=True)
            for piece in gathered_pieces(self.plan, source, operation, self.bucket_bytes, aliases=aliases):
                operation.check()
                yield piece.info.name, piece.tensor
                del piece

    def buckets(self, max_bytes: int = 512 << 20, *, align: int = 256) -> Iterator[Bucket]:
        """Yield every tensor whole, laid with others into buckets of bytes on the device. Otherwise as `tensors`.

        Tensors of one module that come one after the other are never split between two buckets.

        Args:
            max_bytes: Bytes of a bucket; a module with more than that has a larger one of its own.
            align: Tensors begin at multiples of this many bytes, a power of two. With 1 nothing lies between them, and
                the wider dtypes come first.

        Raises:
            ExportError: As `send`.
            UsageError: A number is not positive, or `align` no power of two.
        """
        if min(max_bytes, align) <= 0:
            raise UsageError("buckets of no size", expected="positive numbers of bytes", found=min(max_bytes, align))
        if align & (align - 1):  # a tensor would begin in the middle of its elements
            raise UsageError("places where no tensor can begin", expected="align, a power of two", found=align)
        with self._fence.operation("Exporter.buckets") as operation, closing(self.source) as source:
            self._prepare(operation, "everyone", gather_all=True, options=f" max_bytes={max_bytes} align={align}")
            outputs = self.plan.in_order_of_delivery(self.bucket_bytes).outputs
            packer = Packer(lay_out(outputs, max_bytes, align=align), new_buffer)
            for piece in gathered_pieces(self.plan, source, operation, self.bucket_bytes):
                bucket = packer.add(piece.info, piece.tensor)
                del piece
                if bucket is not None:
                    operation.check()
                    yield bucket
                    del bucket

    def send(self, sink: Sink, *, delivered: Delivered = lambda _: None, gather_all: bool = False) -> None:
        """Deliver everything to a sink, all or nothing. Collective: every rank must call this.

        Args:
            sink: Where it goes.
            delivered: Called with the bytes that this rank has just delivered.
            gather_all: For tests: send every tensor through the device, held or not.

        Raises:
            ExportError: Something failed on some rank; the same error is raised on all.
        """
        self._send(sink, "Exporter.send", delivered=delivered, gather_all=gather_all)

    def _send(self, sink: Sink, what: str, *, gather_all: bool, delivered: Delivered, is_save: bool = False) -> None:
        try:
            with self._fence.operation(what) as operation, closing(self.source) as source:
                if is_save:
                    finish_latest()
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

    @overload
    def save(self, path: Destination, *, blocking: Literal[True] = True, **choices: Any) -> Report: ...

    @overload
    def save(self, path: Destination, *, blocking: Literal[False], **choices: Any) -> PendingSave: ...

    @overload
    def save(self, path: Destination, *, blocking: bool, **choices: Any) -> Report | PendingSave: ...

    def save(  # type: ignore[misc]  # the overloads stand for these options too
        self,
        path: Destination,
        *,
        blocking: bool = True,
        staging: Staging = "auto",
        format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
        max_shard_size: int | str = "5GB",
        tokenizer: object | None = None,
        overwrite: bool = False,
        fsync: bool = True,
        published: Callable[[Path], object] | None = None,
        delivered: Delivered = lambda _: None,
        gather_all: bool = False,
    ) -> Report | PendingSave:
        """Write a checkpoint folder: the old one stays until the new one is complete. Collective.

        What a rank holds it writes itself, without a gather. Peak memory: two buckets on the device for what no rank
        holds whole, and a fixed ring of host memory; with `blocking=False` what this rank writes, until it is written.
        A save waits for the one before it, and raises its error if nobody waited for that.

        Args:
            path: The folder. Other files in it are left alone; an earlier export of ours is replaced. Or a
                `FolderPerVersion`, to write a new folder each time.
            blocking: False to take the values, return, and write on a thread that uses no collective.
            staging: Where values that are on the device wait: `"device"`, there; `"host"`, in pinned memory, which is
                kept for the next save; `"auto"`, on the device if it has memory that was never used.
            format: `"hf"` (`model*.safetensors`, index, config, tokenizer), `"safetensors"` (one file), or `"auto"`:
                hf when the model has a config.
            max_shard_size: Bytes per file for `"hf"`, a number or decimal like `"5GB"`.
            tokenizer: A tokenizer or processor to save with the model.
            overwrite: Whether weights in the folder that we did not write may be replaced.
            fsync: Whether to wait until the disk has the bytes.
            published: Called with the folder on the first rank, once it is complete, for example to have an engine load
                it. What it raises is the error of all ranks; the folder stays.
            delivered: As in `send`; called from the thread that writes.
            gather_all: As in `send`.

        Returns:
            What was written; on ranks other than the first without the names of removed files. With `blocking=False`
            a handle that returns it.

        Raises:
            ExportError: As `send`; the earlier checkpoint is intact.
        """
        check_staging(staging)
        if not isinstance(self._model, nn.Module):
            raise UsageError("save() needs a module", fix="Use send() with a sink, or export_checkpoint()")
        folder, make = (path.path, path.sink) if isinstance(path, FolderPerVersion) else (Path(path), None)
        sink = folder_sink(
            folder,
            make=make,
            format=format,
            has_config=has_config(self._planning.described),
            sidecars=_weak(self._adapter_sidecars if self._planning.is_adapter else self._model_sidecars),
            tokenizer=partial(add_tokenizer, tokenizer=tokenizer),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            fsync=fsync,
            provenance=_weak(self.provenance),
            is_lora=self._planning.is_adapter,
            published=published,
        )
        started = time.perf_counter()
        with one_at_a_time():
            if blocking:
                self._send(sink, "Exporter.send", gather_all=gather_all, delivered=delivered, is_save=True)
                return sink.report(self.plan, time.perf_counter() - started)
            # Made here, since the process group may be gone by the time that it is used.
            fence, staged = self._background(), StagedSink(sink, staging)
            what = "Exporter.save(blocking=False)"
            self._send(staged, what, gather_all=gather_all, delivered=lambda _: None, is_save=True)
            write = partial(write_staged, staged, sink, self.plan, fence, delivered=delivered, started=started)
            return start(sink, write)

    def prepare(self, *, staging: Staging = "auto") -> None:
        """Begin to get the host memory ready that `save(blocking=False)` will take, on a thread. Local.

        Without this the first such save takes memory that is not pinned yet, and is slower than those that follow.

        Args:
            staging: As for `save`.

        Raises:
            UsageError: There is no such staging, or no module to save.
        """
        check_staging(staging)
        if not isinstance(self._model, nn.Module):
            raise UsageError("prepare() needs a module", fix="Only a module is saved in the background")
        are_offloaded = any(parameter.device.type == "cpu" for parameter in self._model.parameters())
        prepare(self.plan, self.source.device, staging, are_offloaded=are_offloaded)

    def release(self) -> None:
        """Give back the host memory that is kept for `save(blocking=False)`, of all exporters of the process. Local.

        Waits for a save in progress.
        """
        wait_for_latest()
        host_memory().release()

    def _adapter_sidecars(self) -> Sidecars:
        return live_lora_sidecars(self._planning.peft_config, self._planning.described)

    def _model_sidecars(self) -> Sidecars:
        model = self._planning.described
        sidecars = from_model(model)
        sidecars.warnings += dtype_notes(self.plan, live_dtypes(model, sidecars.config))
        if self._planning.keeps_lora:
            sidecars.warnings.append("LoRA is not merged: nothing loads these names as a model; lora='merge' merges it")
        return sidecars

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket."""
        default = _CPU_BUCKET_BYTES if self.source.device.type == "cpu" else _BUCKET_BYTES
        return self._bucket_bytes or default

    def _prepare(self, operation: Operation, delivery: Delivery, *, gather_all: bool, options: str = "") -> None:
        seen = self._planning.refresh(operation)
        options = f"delivery={delivery} bucket_bytes={self.bucket_bytes} gather_all={gather_all}{options}{seen}"
        agree_on_plan(self.plan, options, operation)
        check_copies(self.plan, self.source, operation)


def _weak(method: Callable[[], _T]) -> Callable[[], _T]:
    """Return a call of a method that does not keep its object.

    Sinks make it in the operation, where what fails is the error of all ranks; and they outlive an asynchronous save's
    call, as the module need not.
    """
    weak = weakref.WeakMethod(method)

    def call() -> _T:
        strong = weak()
        assert strong is not None
        return strong()

    return call
