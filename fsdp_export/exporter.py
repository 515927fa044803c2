"""One exporter for everything: files, engines and your own loop are three ends of the same walk."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from .agreement import agree_on_plan, check_copies
from .conversion.adapter import conversion_of
from .conversion.aliases import unsaved_names
from .conversion.cut import Conversion
from .conversion.lora_view import LoraView
from .conversion.peft_module import PeftModule, find_peft
from .conversion.transformers import HubConversion, convert_live
from .dtypes import DtypePolicy
from .errors import UsageError
from .fence import Fence, Operation
from .names import select
from .pending import PendingSave, finish_latest, start, wait_for_latest, write_staged
from .plan import Plan
from .sidecars.collect import Sidecars, add_tokenizer, from_model, has_config
from .sidecars.lora import live_lora_sidecars
from .sinks.base import Delivery, Sink
from .sinks.host_memory import host_memory
from .sinks.huggingface import Report, folder_sink
from .sinks.staged import StagedSink, Staging, check_staging, prepare
from .sources.base import Source
from .sources.live import LiveSource, find_ranks
from .spec import TensorSpec
from .steps import copy_step
from .ties import LiveTies, equal_ties, live_ties
from .walk import Delivered, gathered_pieces, run

__all__ = ["Exporter"]

# Larger buckets gain nothing, neither over NVLink nor on the CPU, where they are host memory.
_BUCKET_BYTES = 512 << 20
_CPU_BUCKET_BYTES = 32 << 20


class Exporter:
    """Delivers the tensors of a sharded module, bucket by bucket, without moving or changing it.

    Making one is local and free; the plan is made at the first use and reused. Values are read at each use.

    Args:
        model: The module (FSDP2, DDP or plain), or a `Source`.
        state_dict: Other values under the module's names, for example an EMA: DTensors, or local tensors of the
            shapes of the module's own local tensors. A missing or misshapen one is an error.
        dtype: What floating tensors are cast to: `"keep"`, a torch dtype or its name.
        include: Patterns of names to export; see `fsdp_export.names.select`.
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
        device: Where tensors are gathered; default: this rank's device of the mesh.
        bucket_bytes: Bytes gathered at a time; at most two buckets are alive. Default: 512 MiB, 32 MiB on the CPU.
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
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        adapter: Any = None,
        lora: str | LoraView = "auto",
        aliases: Mapping[str, str] | None = None,
        untied: Sequence[str] = (),
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
        self._model, self._state_dict, self._lora = model, state_dict, lora
        self._dtype = DtypePolicy.parse(dtype)
        self._include, self._exclude = ((p,) if isinstance(p, str) else tuple(p) for p in (include, exclude))
        self._equal: dict[str, str] = {}  # of ties that are broken, those whose values were equal when last looked at
        self._adapter, self._given_aliases, self._untied = adapter, aliases, tuple(untied)
        self._device = torch.device(device) if device is not None else None
        self._bucket_bytes = bucket_bytes
        ranks, rank = find_ranks(model) if isinstance(model, nn.Module) else (model.ranks, model.rank)
        self._fence = Fence(ranks, rank, timeout=timeout)
        self._background = partial(Fence, ranks, rank, timeout=timeout, is_background=True)

    @cached_property
    def source(self) -> Source:
        """What is exported. Local; raises what cannot be exported (`SourceError`, `UsageError`)."""
        if not isinstance(self._model, nn.Module):
            return self._model
        aliases = self._ties.aliases if self._peft is None else {}
        return LiveSource(self._model, state_dict=self._state_dict, aliases=aliases, device=self._device)

    @cached_property
    def plan(self) -> Plan:
        """Names, shapes and dtypes that will be delivered; prints as a table. Local, and nothing is gathered.

        Where a module has two parameters for one that its config declares tied, both count until an export compares
        them.
        """
        given = self._given_aliases or {}
        specs = {spec.name: spec for spec in self._specs}
        available = self.conversion.names if self.conversion is not None else tuple(specs)
        kept = [name for name in available if name not in given]
        self.num_available = len(kept)
        names, self.pattern_hits = select(kept, self._include, self._exclude)
        if self.conversion is not None:
            steps = self.conversion.steps(frozenset(names), self._dtype.cast_of)
        else:
            steps = [copy_step(specs[name], self._dtype.cast_of(specs[name].dtype)) for name in names]
        if self.lora_view is not None:
            steps = [self.lora_view.on_source(step) for step in steps]
        blocks = self.conversion.blocks if self.conversion is not None else {}
        aliases = {self._renamed(alias): self._renamed(kept) for alias, kept in self._aliases.items()}
        return Plan(
            tuple(steps),
            self.source.ranks,
            tuple(sorted(aliases.items())),
            self._untied or tuple(sorted({*self._ties.ended, *self._ties.broken} - self._equal.keys())),
            are_tied_by_hand=self._ties.are_undeclared,
            names=tuple(names),
            blocks=blocks,
        )

    @cached_property
    def conversion(self) -> Conversion | None:
        """How tensors become those of the checkpoint; None where they stay. Local, and nothing is read.

        What the adapter does, or, for models of transformers, what `save_pretrained` does.
        """
        if isinstance(self._adapter, Conversion):
            return self._adapter
        if self._adapter is not None:
            return Conversion(conversion_of(self._adapter), self._specs)
        if not isinstance(self._model, nn.Module) or (self._found_peft is not None and not self._is_merged):
            return None
        return convert_live(self._model, self._specs, self._peft)

    @cached_property
    def lora_view(self) -> LoraView | None:
        """The tensors as `lora` asks for them; None for what is exported as it is. Local, and nothing is read."""
        if self._peft is None:
            return self._lora if isinstance(self._lora, LoraView) else None
        see = self._peft.adapter if self._lora == "adapter" else self._peft.merged
        return see(self.source.specs, self.source.device)

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
    def save(self, path: str | PathLike[str], *, blocking: Literal[True] = True, **choices: Any) -> Report: ...

    @overload
    def save(self, path: str | PathLike[str], *, blocking: Literal[False], **choices: Any) -> PendingSave: ...

    @overload
    def save(self, path: str | PathLike[str], *, blocking: bool, **choices: Any) -> Report | PendingSave: ...

    def save(  # type: ignore[misc]  # the overloads stand for these options too
        self,
        path: str | PathLike[str],
        *,
        blocking: bool = True,
        staging: Staging = "auto",
        format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
        max_shard_size: int | str = "5GB",
        tokenizer: object | None = None,
        overwrite: bool = False,
        fsync: bool = True,
        delivered: Delivered = lambda _: None,
        gather_all: bool = False,
    ) -> Report | PendingSave:
        """Write a checkpoint folder: the old one stays until the new one is complete. Collective.

        What a rank holds it writes itself, without a gather. Peak memory: two buckets on the device for what no rank
        holds whole, and a fixed ring of host memory; with `blocking=False` what this rank writes, until it is written.
        A save waits for the one before it, and raises its error if nobody waited for that.

        Args:
            path: The folder. Other files in it are left alone; an earlier export of ours is replaced.
            blocking: False to take the values, return, and write on a thread that uses no collective.
            staging: Where values that are on the device wait: `"device"`, there; `"host"`, in pinned memory, which is
                kept for the next save; `"auto"`, on the device if it has memory that was never used.
            format: `"hf"` (`model*.safetensors`, index, config, tokenizer), `"safetensors"` (one file), or `"auto"`:
                hf when the model has a config.
            max_shard_size: Bytes per file for `"hf"`, a number or decimal like `"5GB"`.
            tokenizer: A tokenizer or processor to save with the model.
            overwrite: Whether weights in the folder that we did not write may be replaced.
            fsync: Whether to wait until the disk has the bytes.
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
        sink = folder_sink(
            Path(path),
            format=format,
            has_config=has_config(self._described),
            sidecars=self._sidecars(),
            tokenizer=partial(add_tokenizer, tokenizer=tokenizer),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            fsync=fsync,
            provenance={"lora": self.lora_view.kind} if self.lora_view is not None else None,
            is_lora=self.lora_view is not None and self.lora_view.kind == "adapter",
        )
        started = time.perf_counter()
        if blocking:
            self._send(sink, "Exporter.send", gather_all=gather_all, delivered=delivered, is_save=True)
            return sink.report(self.plan, time.perf_counter() - started)
        # Made here, since the process group may be gone by the time that it is used.
        fence, staged = self._background(), StagedSink(sink, staging)
        what = "Exporter.save(blocking=False)"
        self._send(staged, what, gather_all=gather_all, delivered=lambda _: None, is_save=True)
        return start(sink, partial(write_staged, staged, sink, self.plan, fence, delivered=delivered, started=started))

    def prepare(self, *, staging: Staging = "auto") -> None:
        """Begin to get the host memory ready that `save(blocking=False)` will take, on a thread. Local.

        Without this the first such save takes memory that is not pinned yet, and is slower than those that follow.

        Args:
            staging: As for `save`.
        """
        check_staging(staging)
        assert isinstance(self._model, nn.Module)
        are_offloaded = any(parameter.device.type == "cpu" for parameter in self._model.parameters())
        prepare(self.plan, self.source.device, staging, are_offloaded=are_offloaded)

    def release(self) -> None:
        """Give back the host memory that is kept for `save(blocking=False)`, of all exporters of the process. Local.

        Waits for a save in progress.
        """
        wait_for_latest()
        host_memory().release()

    def _sidecars(self) -> Callable[[], Sidecars]:
        find: Callable[[Any], Sidecars] = from_model
        if self._peft is not None and self._lora == "adapter":
            find = partial(live_lora_sidecars, self._peft.config)
        # A sink may outlive the module.
        described = weakref.ref(self._described)
        return lambda: find(described())

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket."""
        default = _CPU_BUCKET_BYTES if self.source.device.type == "cpu" else _BUCKET_BYTES
        return self._bucket_bytes or default

    @property
    def _specs(self) -> list[TensorSpec]:
        """The tensors of a checkpoint, in the module's names."""
        specs = self.lora_view.specs if self.lora_view is not None else list(self.source.specs)
        if not isinstance(self._model, nn.Module):
            return specs
        base = self._peft.base if self._peft is not None else self._model
        left_out = unsaved_names(base) | self._aliases.keys()
        return [spec for spec in specs if spec.name not in left_out]

    @property
    def _described(self) -> nn.Module:
        """The module that a checkpoint's config describes: names that are kept do not change it."""
        assert isinstance(self._model, nn.Module)
        return self._found_peft.base if self._found_peft is not None else self._model

    @property
    def _peft(self) -> PeftModule | None:
        """What PEFT has made of the module, if that is not to be kept."""
        return self._found_peft if self._lora != "keep" else None

    @cached_property
    def _found_peft(self) -> PeftModule | None:
        return find_peft(self._model) if isinstance(self._model, nn.Module) else None

    @cached_property
    def _ties(self) -> LiveTies:
        if not isinstance(self._model, nn.Module) or (self._peft is not None and not self._is_merged):
            return LiveTies({}, {}, are_undeclared=False)
        return live_ties(self._model, self._peft, self.lora_view)

    @property
    def _is_merged(self) -> bool:
        return self.lora_view is not None and self.lora_view.kind == "merge"

    @property
    def _aliases(self) -> dict[str, str]:
        """Names to leave out: of a live module in its own names, with ties that are broken but were found equal."""
        return {**(self._given_aliases or {}), **self._ties.aliases, **self._equal}

    def _renamed(self, name: str) -> str:
        conversion = self.conversion if isinstance(self._model, nn.Module) else None
        return conversion.renamed(name) if isinstance(conversion, HubConversion) else name

    def _prepare(self, operation: Operation, delivery: Delivery, *, gather_all: bool) -> None:
        self.source.refresh()
        if self._ties.broken:
            specs = {spec.name: spec for spec in self.source.specs}
            origins = self.lora_view.origins if self.lora_view is not None else specs
            equal = equal_ties(self.source, self._ties, operation, origins)
            if equal != self._equal:
                self._equal = equal
                for made in ("plan", "conversion"):
                    vars(self).pop(made, None)
        options = f"delivery={delivery} bucket_bytes={self.bucket_bytes} gather_all={gather_all}"
        if self._peft is not None and self.lora_view is not None:
            self._peft.refresh(self.lora_view, self.source.specs)
            options += f" lora={self.lora_view.digest}"
        agree_on_plan(self.plan, options, operation)
        check_copies(self.plan, self.source, operation)
