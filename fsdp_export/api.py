"""The library calls: a source and a sink, put together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .conversion.adapter import conversion_of, load_adapter
from .conversion.aliases import declared_aliases
from .conversion.cut import Conversion
from .conversion.shapes import compare_with_config
from .conversion.twin import meta_twin
from .dtypes import DtypePolicy
from .errors import ComparisonError, SourceError, UsageError, listing
from .exporter import Exporter
from .fence import Fence, Operation
from .layout import FileLayout
from .lora import describe_lora, name_as_lora
from .sidecars.collect import Sidecars, from_folder
from .sidecars.origins import CONFIG
from .sinks.compare import CompareSink
from .sinks.huggingface import ADAPTER_FILE, Report, folder_layouts, folder_sink
from .sources.base import Source
from .sources.detect import open_source
from .sources.hf_folder import HfFolderSource
from .spec import TensorSpec
from .table import dtype_name
from .verification import Verification
from .walk import CHUNK_BYTES, Delivered

__all__ = ["OpenedCheckpoint", "export_checkpoint", "open_checkpoint", "save_checkpoint"]


def save_checkpoint(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    dtype: str | torch.dtype = "keep",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    timeout: float = 600.0,
    **choices: Any,
) -> Report:
    """Write a module as a checkpoint folder. Collective: every rank must call this.

    Args:
        model: The module: FSDP2 (1-D, HSDP, with tensor parallelism), DDP or plain; on any device.
        path: The folder. The old checkpoint in it stays until the new one is complete.
        state_dict: Other values under the module's names; see `Exporter`.
        dtype: What floating tensors are cast to, or `"keep"`.
        include: Patterns of names to export.
        exclude: Patterns of names to leave out.
        adapter: Turns the module's names and tensors into those of the checkpoint; see `Exporter`.
        timeout: Seconds to wait for a rank that does not call.
        **choices: `format`, `max_shard_size`, `tokenizer`, `overwrite`, `fsync`; see `Exporter.save`.

    Returns:
        What was written.

    Raises:
        ExportError: Something failed on some rank; the same error is raised on all, and an earlier checkpoint in
            the folder is intact.
    """
    exporter = Exporter(
        model,
        state_dict=state_dict,
        dtype=dtype,
        include=include,
        exclude=exclude,
        adapter=adapter,
        timeout=timeout,
    )
    return exporter.save(path, **choices)


def export_checkpoint(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    base_model: str | PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype = "keep",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    device: torch.device | str | None = None,
    verify: bool = False,
    **choices: Any,
) -> Report:
    """Write a sharded checkpoint on disk as a checkpoint folder. Needs no process group, GPU or model.

    Args:
        source: A DCP folder, or a folder above it, whose newest complete step is taken.
        path: The folder. The old checkpoint in it stays until the new one is complete.
        base_model: Where config, tokenizer and code come from: a folder or a hub id.
        prefix: Export what lies below this prefix; default: found by itself.
        dtype: What floating tensors are cast to; `"keep"`, or `"auto"` for the base config's dtype where it narrows.
        include: Patterns of names to export.
        exclude: Patterns of names to leave out.
        adapter: Turns the checkpoint's names and tensors into those of Hugging Face; see `Exporter`. A string is
            imported; see `fsdp_export.conversion.adapter.load_adapter`.
        device: Where tensors are converted; default: the CPU.
        verify: Whether to read back what was written and compare it with the source.
        **choices: `format`, `max_shard_size`, `overwrite`, `fsync`; see `Exporter.save`.

    Returns:
        What was written.

    Raises:
        ComparisonError: What was written differs from the source; it is left in the folder.
        ExportError: The checkpoint cannot be read, or the folder not be written.
    """
    checkpoint = open_checkpoint(
        source,
        base_model=base_model,
        prefix=prefix,
        dtype=dtype,
        include=include,
        exclude=exclude,
        adapter=adapter,
        device=device,
        format=choices.get("format", "auto"),
    )
    report = checkpoint.save(path, **choices)
    if verify:
        verification = checkpoint.verify(path)
        if (error := verification.error()) is not None:
            raise error
        report = replace(report, verification=verification)
    return replace(report, notes=[*checkpoint.notes, *report.notes])


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint on disk, ready to be exported.

    Attributes:
        source: What is read.
        exporter: What reads it.
        sidecars: The config, tokenizer and other files that were found for it.
        base_model: Where these were looked for first.
        heeds_config: Whether the config had a say in names or dtypes, which counts even where it is not written.
        notes: What was decided, a line each.
        is_lora: Whether it is a LoRA adapter and no model.
        lacks: Why there is no config for the adapter; None if there is one.
    """

    source: Source
    exporter: Exporter
    sidecars: Sidecars
    base_model: str | None
    heeds_config: bool
    notes: list[str]
    is_lora: bool = False
    lacks: SourceError | None = None

    def files(self, *, format: str = "auto", max_shard_size: int | str = "5GB") -> list[FileLayout]:  # noqa: A002
        """Return the files that `save` would write."""
        lay_out = folder_layouts(
            format,
            has_config=self.sidecars.config is not None,
            max_shard_size=max_shard_size,
            is_lora=self.is_lora,
        )
        self._refuse_to_lack_config(format)
        return lay_out(self.exporter.plan)

    def save(
        self,
        path: str | PathLike[str],
        *,
        format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        fsync: bool = True,
        delivered: Delivered = lambda _: None,
    ) -> Report:
        """Write the checkpoint folder; the arguments are those of `Exporter.save`. Collective."""
        folder = Path(path)
        self._refuse_to_lack_config(format)
        self._refuse_to_replace_inputs(folder)
        sink = folder_sink(
            folder,
            format=format,
            has_config=self.sidecars.config is not None,
            sidecars=lambda: self.sidecars,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            fsync=fsync,
            provenance={"source": _provenance(self.source)},
            is_lora=self.is_lora,
        )
        started = time.perf_counter()
        self.exporter.send(sink, delivered=delivered)
        return sink.report(self.exporter.plan, time.perf_counter() - started)

    def verify(self, path: str | PathLike[str], *, delivered: Delivered = lambda _: None) -> Verification:
        """Read a folder that was written, and compare every tensor with the source, as `save` converts it. Collective.

        Nothing is held in memory but the rows that are compared. Before, the kernel is asked to forget what it keeps
        of the files, so that the disk is read.

        Args:
            path: The folder.
            delivered: Called with the bytes that this rank has just compared.

        Returns:
            What came of it, the same on every rank. A difference, or a folder that cannot be read, is no exception.

        Raises:
            ExportError: The source cannot be read on some rank; the same error is raised on all.
        """
        folder, started = Path(path), time.perf_counter()
        sink = CompareSink(folder, lambda: _written(folder, is_lora=self.is_lora))
        try:
            self.exporter.send(sink, delivered=delivered)
        except ComparisonError as error:
            plan, seconds = self.exporter.plan, time.perf_counter() - started
            return Verification(folder, len(plan.outputs), plan.num_bytes, seconds, failure=str(error))
        with Fence(self.source.ranks, self.source.rank).operation("OpenedCheckpoint.verify") as operation:
            cards = operation.agree(sink.card())
        return sink.verification(cards, time.perf_counter() - started)

    def _refuse_to_lack_config(self, format: str) -> None:  # noqa: A002  as above
        if self.lacks is not None and format != "safetensors":
            raise self.lacks

    def _refuse_to_replace_inputs(self, folder: Path) -> None:
        """Keep the files that are read. A link in the folder is replaced itself, not what it points to."""
        here, fix = folder.resolve(), "Write into another folder"
        if self.base_model is not None and folder.is_dir() and here == Path(self.base_model).resolve():
            raise UsageError("the base model would be replaced", file=folder, fix=fix)
        files = {sidecar.name: sidecar.content for sidecar in self.sidecars.files}
        read = {name: path.parent.resolve() / path.name for name, path in files.items() if isinstance(path, Path)}
        replaced = [name for name, path in read.items() if path == here / name]
        if replaced:
            raise UsageError("files that are read would be replaced", file=folder, found=listing(replaced), fix=fix)


def open_checkpoint(
    source: str | PathLike[str],
    *,
    base_model: str | PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype = "keep",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    device: torch.device | str | None = None,
    format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
    ranks: tuple[int, ...] = (0,),
    rank: int = 0,
) -> OpenedCheckpoint:
    """Find and open a checkpoint on disk. Collective among `ranks`, which will share the writing.

    Args:
        source: As in `export_checkpoint`, and so are the others.
        base_model: See there.
        prefix: See there.
        dtype: See there.
        include: See there.
        exclude: See there.
        adapter: See there.
        device: See there.
        format: What will be written. With `"safetensors"` the config need not fit the tensors.
        ranks: The global ranks that export together; `(0,)` without a process group.
        rank: This process's global rank.

    Raises:
        ExportError: It cannot be read on some rank; the same error is raised on all.
    """
    base = os.fspath(base_model) if base_model is not None else None
    with Fence(ranks, rank).operation("open_checkpoint") as operation:
        opened = open_source(Path(source), prefix=prefix, ranks=ranks, rank=rank, device=_usable(device))
        is_lora, notes = name_as_lora(opened) if adapter is None else (False, [])
        if rank != ranks[0]:
            operation.agree()
        sidecars = from_folder(opened.folder, base)
        if rank == ranks[0]:
            # What had to be downloaded is there now, and the other ranks need not do it too.
            operation.agree()
        config = sidecars.config or {}
        if dtype == "auto" and is_lora:  # it is small, and its base model's dtype is not its own
            dtype = "keep"
        policy = _narrowing_to(_named_dtype(config)) if dtype == "auto" else DtypePolicy.parse(dtype)
        twin = meta_twin(config) if config and not is_lora else None
        conversion = _conversion(adapter, opened, sidecars)
        origins = _origins(opened, conversion)
        aliases, untied = _aliases(opened, origins, twin, operation)
        exporter = Exporter(
            opened,
            dtype=policy,
            include=include,
            exclude=exclude,
            adapter=conversion,
            aliases=aliases,
            untied=untied,
        )
        heeds_config = bool(policy.only_narrow or aliases or untied)
        notes += [*_cast_notes(exporter, policy), *_pattern_notes(exporter, include, exclude)]
        notes += [f"{alias} is tied to {kept} and left out" for alias, kept in aliases.items()]
        if conversion is not None and conversion.unused:
            notes.append(f"the adapter makes nothing of {len(conversion.unused):,}: {listing(conversion.unused)}")
        lacks = None
        if is_lora:
            sidecars, lacks = describe_lora(opened, exporter.plan.outputs, sidecars, base)
        elif format != "safetensors":
            sidecars = _fit_to_shapes(sidecars, exporter, origins, twin, notes)
    return OpenedCheckpoint(opened, exporter, sidecars, base, heeds_config, notes, is_lora, lacks)


def _written(folder: Path, *, is_lora: bool) -> HfFolderSource:
    """Open the files of an export, whatever else lies in the folder."""
    names = (ADAPTER_FILE,) if is_lora else ("model.safetensors.index.json", "model.safetensors")
    return HfFolderSource(next((folder / name for name in names if (folder / name).is_file()), folder))


def _provenance(source: Source) -> str:
    """Tell what was exported, without the places of a machine: the record may be published with the weights."""
    parts = source.folder.absolute().parts[-2:] if source.folder is not None else ()
    return f"{'/'.join(parts)}: {source.description}"


def _usable(device: torch.device | str | None) -> torch.device | None:
    """Return a device on which there can be tensors.

    Raises:
        UsageError: This is none.
    """
    if device is None:
        return None
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:  # torch lacks it, or there is none
        raise UsageError(
            "a device that cannot be used here", found=device, fix="Leave it out to use the CPU"
        ) from error
    return torch.device(device)


def _named_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config names, for the whole model or for its text part."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return next((str(part[key]) for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)


def _narrowing_to(named: str | None) -> DtypePolicy:
    """Return the policy that casts to a dtype what is wider; one to which nothing is cast, or none, changes nothing."""
    try:
        target = DtypePolicy.parse(named or "keep").target
    except UsageError:
        target = None
    return DtypePolicy(target, only_narrow=target is not None)


def _cast_notes(exporter: Exporter, policy: DtypePolicy) -> list[str]:
    """Tell what the config, and not the user, has decided."""
    dtypes = {spec.dtype for step in exporter.plan.steps for spec in step.inputs}
    wider = sorted(dtype_name(dtype) for dtype in dtypes if policy.cast_of(dtype) is not None)
    if not (policy.only_narrow and wider):
        return []
    target = dtype_name(policy.target)
    return [f"{' and '.join(wider)} becomes {target}, as the config says (--dtype keep to keep it)"]


def _pattern_notes(exporter: Exporter, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    names = exporter.source.specs if exporter.conversion is None else exporter.conversion.names
    num_tensors, hits = len(names) - len(exporter.plan.aliases), exporter.pattern_hits
    options = [*(("include", pattern) for pattern in include), *(("exclude", pattern) for pattern in exclude)]
    return [f"{option} {pattern}: {hits[pattern]:,} of {num_tensors:,} tensors" for option, pattern in options]


def _conversion(adapter: Any, source: Source, sidecars: Sidecars) -> Conversion | None:
    """Plan what an adapter, or one that a string names, does to a checkpoint."""
    if adapter is None:
        return None
    if isinstance(adapter, str):
        places = [sidecar.content for sidecar in sidecars.files if sidecar.name == CONFIG]
        assets = next((place.parent for place in places if isinstance(place, Path)), None)
        adapter = load_adapter(adapter, config=sidecars.config, assets=assets)
    return Conversion(conversion_of(adapter), source.specs)


def _origins(source: Source, conversion: Conversion | None) -> dict[str, TensorSpec | None]:
    """Map the names that can be exported to the tensors that they are; None for what is made of others."""
    if conversion is not None:
        return {name: conversion.origin(name) for name in conversion.names}
    return {spec.name: spec for spec in source.specs}


def _fit_to_shapes(
    sidecars: Sidecars, exporter: Exporter, names: Iterable[str], twin: nn.Module | None, notes: list[str]
) -> Sidecars:
    """Return the sidecars with a config that fits the shapes; add what was noticed to the notes.

    Raises:
        SourceError: No config fits them.
    """
    comparison = compare_with_config(
        exporter.plan.outputs,
        list(names),
        twin,
        sidecars.config or {},
        folder=exporter.source.folder,
        config_file=sidecars.config_file,
    )
    if comparison.error is not None:
        raise comparison.error
    notes += comparison.notes
    return replace(sidecars, edits=comparison.edits)


def _aliases(
    source: Source, origins: Mapping[str, TensorSpec | None], twin: nn.Module | None, operation: Operation
) -> tuple[dict[str, str], list[str]]:
    """Return the names under which a checkpoint stores a tied tensor once more, and those that only should be tied."""
    declared = declared_aliases(twin, origins)
    part, parts = source.ranks.index(source.rank), len(source.ranks)
    equal = [_are_equal(source, origins[alias], origins[kept], part, parts) for alias, kept in declared.items()]
    everyones = operation.agree("".join("01"[is_equal] for is_equal in equal)) if declared else []
    differing = {alias for alias, *cards in zip(declared, *everyones, strict=True) if "0" in cards}
    return {alias: kept for alias, kept in declared.items() if alias not in differing}, sorted(differing)


def _are_equal(source: Source, one: TensorSpec | None, other: TensorSpec | None, part: int, parts: int) -> bool:
    """Compare every so many-th chunk of two tensors, byte by byte. What is made of others counts as different."""
    if one is None or other is None:
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = max(CHUNK_BYTES // max(one.row_bytes, 1), 1)
    return all(
        torch.equal(_bytes(source, one, first, rows), _bytes(source, other, first, rows))
        for first in range(part * rows, one.num_rows, parts * rows)
    )


def _bytes(source: Source, spec: TensorSpec, first: int, rows: int) -> torch.Tensor:
    return source.rows(spec, first, min(first + rows, spec.num_rows)).contiguous().reshape(-1).view(torch.uint8)
