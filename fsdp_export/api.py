"""The library calls: a source and a sink, put together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .conversion.aliases import declared_aliases
from .dtypes import DtypePolicy
from .errors import UsageError
from .exporter import Exporter
from .fence import Fence
from .layout import FileLayout
from .sidecars.collect import Sidecars, from_folder
from .sinks.huggingface import Report, folder_layouts, folder_sink
from .sources.base import Source
from .sources.detect import open_source
from .spec import TensorSpec
from .table import dtype_name
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
        timeout: Seconds to wait for a rank that does not call.
        **choices: `format`, `max_shard_size`, `tokenizer`, `overwrite`, `fsync`; see `Exporter.save`.

    Returns:
        What was written.

    Raises:
        ExportError: Something failed on some rank; the same error is raised on all, and an earlier checkpoint in
            the folder is intact.
    """
    exporter = Exporter(model, state_dict=state_dict, dtype=dtype, include=include, exclude=exclude, timeout=timeout)
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
    device: torch.device | str | None = None,
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
        device: Where tensors are converted; default: the CPU.
        **choices: `format`, `max_shard_size`, `overwrite`, `fsync`; see `Exporter.save`.

    Returns:
        What was written.

    Raises:
        ExportError: The checkpoint cannot be read, or the folder not be written.
    """
    checkpoint = open_checkpoint(
        source, base_model=base_model, prefix=prefix, dtype=dtype, include=include, exclude=exclude, device=device
    )
    return checkpoint.save(path, **choices)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint on disk, ready to be exported.

    Attributes:
        source: What is read.
        exporter: What reads it.
        sidecars: The config, tokenizer and other files that were found for it.
        base_model: Where these were looked for as well.
        notes: What was found or decided, a line each.
    """

    source: Source
    exporter: Exporter
    sidecars: Sidecars
    base_model: str | None
    notes: list[str] = field(default_factory=list)

    def files(self, *, format: str = "auto", max_shard_size: int | str = "5GB") -> list[FileLayout]:  # noqa: A002
        """Return the files that `save` would write."""
        lay_out = folder_layouts(format, has_config=self.sidecars.config is not None, max_shard_size=max_shard_size)
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
        if self.base_model is not None and folder.exists() and folder.resolve() == Path(self.base_model).resolve():
            raise UsageError("the folder of the base model would be replaced", file=folder, fix="Write elsewhere")
        sink = folder_sink(
            folder,
            format=format,
            has_config=self.sidecars.config is not None,
            sidecars=lambda: self.sidecars,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            fsync=fsync,
            provenance={"source": self.source.description},
        )
        started = time.perf_counter()
        self.exporter.send(sink, delivered=delivered)
        return sink.report(self.exporter.plan, time.perf_counter() - started)


def open_checkpoint(
    source: str | PathLike[str],
    *,
    base_model: str | PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype = "keep",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    device: torch.device | str | None = None,
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
        device: See there.
        ranks: The global ranks that export together; `(0,)` without a process group.
        rank: This process's global rank.

    Raises:
        ExportError: It cannot be read on some rank; the same error is raised on all.
    """
    with Fence(ranks, rank).operation("open_checkpoint"):
        opened = open_source(
            Path(source),
            prefix=prefix,
            ranks=ranks,
            rank=rank,
            device=torch.device(device) if device is not None else None,
        )
        sidecars = from_folder(opened.folder, base_model)
        notes: list[str] = []
        policy = _auto_dtype(opened, sidecars, notes) if dtype == "auto" else DtypePolicy.parse(dtype)
        aliases, untied = _aliases(opened, sidecars)
        exporter = Exporter(opened, dtype=policy, include=include, exclude=exclude, aliases=aliases, untied=untied)
        hits = exporter.plan and exporter.pattern_hits
        notes += [f"{pattern}: {count:,} of {len(opened.specs):,} tensors" for pattern, count in hits.items()]
    return OpenedCheckpoint(opened, exporter, sidecars, str(base_model) if base_model is not None else None, notes)


def _auto_dtype(source: Source, sidecars: Sidecars, notes: list[str]) -> DtypePolicy:
    """Choose the dtype that the base config names, for tensors that are wider."""
    config = sidecars.config or {}
    text = config.get("text_config") or {}
    named = next(
        (value for part in (config, text) for key in ("dtype", "torch_dtype") if (value := part.get(key))), None
    )
    if named is None:
        return DtypePolicy()
    policy = DtypePolicy(DtypePolicy.parse(str(named)).target, only_narrow=True)
    wider = {dtype_name(spec.dtype) for spec in source.specs if policy.cast_of(spec.dtype) is not None}
    if wider:
        notes.append(
            f"{' and '.join(sorted(wider))} is written as {named}, the config's dtype (--dtype keep to keep it)"
        )
    return policy


def _are_equal(source: Source, one: TensorSpec, other: TensorSpec) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = max(CHUNK_BYTES // max(one.row_bytes, 1), 1)
    return all(
        torch.equal(_rows(source, one, first, rows), _rows(source, other, first, rows))
        for first in range(0, one.num_rows, rows)
    )


def _rows(source: Source, spec: TensorSpec, first: int, rows: int) -> torch.Tensor:
    return source.rows(spec, first, min(first + rows, spec.num_rows)).contiguous().reshape(-1).view(torch.uint8)


def _aliases(source: Source, sidecars: Sidecars) -> tuple[dict[str, str], list[str]]:
    """Return the names under which a checkpoint stores a tied tensor once more, and those that only should be tied."""
    specs = {spec.name: spec for spec in source.specs}
    declared = declared_aliases(sidecars.config, specs) if sidecars.config is not None else {}
    aliases = {alias: kept for alias, kept in declared.items() if _are_equal(source, specs[alias], specs[kept])}
    return aliases, [alias for alias in declared if alias not in aliases]
