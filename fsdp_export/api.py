"""The library calls: a source and a sink, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, overload

import torch
from torch import nn

from .comparing import open_two
from .exporter import Exporter
from .opening import open_checkpoint
from .pending import PendingSave
from .sinks.huggingface import Report
from .sinks.versioned import Destination
from .verification import Comparison

__all__ = ["compare_checkpoints", "export_checkpoint", "save_checkpoint"]


@overload
def save_checkpoint(
    model: nn.Module, path: Destination, *, blocking: Literal[True] = True, **choices: Any
) -> Report: ...


@overload
def save_checkpoint(
    model: nn.Module, path: Destination, *, blocking: Literal[False], **choices: Any
) -> PendingSave: ...


@overload
def save_checkpoint(model: nn.Module, path: Destination, *, blocking: bool, **choices: Any) -> Report | PendingSave: ...


def save_checkpoint(
    model: nn.Module,
    path: Destination,
    *,
    blocking: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    dtype: str | torch.dtype = "keep",
    keep_dtype: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    lora: str = "auto",
    timeout: float = 600.0,
    **choices: Any,
) -> Report | PendingSave:
    """Write a module as a checkpoint folder. Collective: every rank must call this.

    Args:
        model: The module: FSDP2 (1-D, HSDP, with tensor parallelism), DDP or plain; on any device.
        path: The folder, whose old checkpoint stays until the new one is complete; or a `FolderPerVersion`.
        blocking: False to take the values, return, and write while training goes on; see `Exporter.save`.
        state_dict: Other values under the module's names; see `Exporter`.
        dtype: What floating tensors are cast to, or `"keep"`; see `Exporter`.
        keep_dtype: Patterns of names whose tensors are not cast.
        include: Patterns of names to export.
        exclude: Patterns of names to leave out.
        adapter: Turns the module's names and tensors into those of the checkpoint; see `Exporter`.
        lora: What becomes of a PEFT model: `"adapter"`, a folder as PEFT's own `save_pretrained` writes it; `"merge"`,
            the model with the adapter in its weights; `"keep"`, all tensors under the names that they have. `"auto"` is
            `"adapter"`.
        timeout: Seconds to wait for a rank that does not call.
        **choices: `format`, `max_shard_size`, `tokenizer`, `overwrite`, `fsync`, `staging`; see `Exporter.save`.

    Returns:
        What was written; with `blocking=False` a handle whose `wait()` returns that.

    Raises:
        ExportError: Something failed on some rank; the same error is raised on all, and an earlier checkpoint in
            the folder is intact.
    """
    exporter = Exporter(
        model,
        state_dict=state_dict,
        dtype=dtype,
        keep_dtype=keep_dtype,
        include=include,
        exclude=exclude,
        adapter=adapter,
        lora="adapter" if lora == "auto" else lora,
        timeout=timeout,
    )
    return exporter.save(path, blocking=blocking, **choices)


def export_checkpoint(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    base_model: str | PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype = "keep",
    keep_dtype: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    trust_remote_code: bool = False,
    lora: str = "auto",
    device: torch.device | str | None = None,
    verify: bool = False,
    **choices: Any,
) -> Report:
    """Write a sharded checkpoint on disk as a checkpoint folder. Needs no process group, GPU or model.

    Args:
        source: A checkpoint in any layout that docs/sources.md lists, or a folder above it, whose newest complete step
            is taken.
        path: The folder. The old checkpoint in it stays until the new one is complete.
        base_model: Where config, tokenizer and code come from: a folder or a hub id.
        prefix: Export what lies below this prefix; default: found by itself.
        dtype: What floating tensors are cast to; `"keep"`, or `"auto"` for the base config's dtype where it narrows.
        keep_dtype: Patterns of names whose tensors are not cast.
        include: Patterns of names to export.
        exclude: Patterns of names to leave out.
        adapter: Turns the checkpoint's names and tensors into those of Hugging Face; see `Exporter`. A string is
            imported; see `fsdp_export.conversion.adapter.load_adapter`. Without one, names and tensors become those
            that `save_pretrained` of the config's class writes; names that are those already stay.
        trust_remote_code: Whether the code that the config names may be run, to learn its model's names and ties.
        lora: What becomes of a PEFT model's state dict: `"merge"`, the model with the adapter in its weights;
            `"adapter"`, the adapter alone, as PEFT loads it; `"keep"`, all tensors under the names that they have.
            `"auto"` is `"merge"`, and `"adapter"` where there are no other weights.
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
        keep_dtype=keep_dtype,
        include=include,
        exclude=exclude,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
        lora=lora,
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


def compare_checkpoints(
    first: str | PathLike[str],
    second: str | PathLike[str],
    *,
    base_model: str | PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype = "keep",
    keep_dtype: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    trust_remote_code: bool = False,
    lora: str = "auto",
    device: torch.device | str | None = None,
) -> Comparison:
    """Compare two checkpoints on disk: names, shapes, dtypes, and every value. Needs no process group, GPU or model.

    Each is read as an export would read it, so that a sharded checkpoint of a model equals its exported folder. Where
    only one of them has a config, it stands in for that of the other. Names of tied tensors are one tensor, and may be
    missing. Bytes are compared, or values in float64 where dtypes differ. No more is held in memory than a few rows.

    Args:
        first: What is expected: a checkpoint in any layout that docs/sources.md lists, a folder above it, or the folder
            of an adapter of PEFT.
        second: What is compared with it.
        base_model: Where the config of both is taken from: a folder or a hub id.
        prefix: What the names of the first one's model begin with; default: found by itself.
        dtype: What floating tensors of both are cast to before they are compared; see `export_checkpoint`.
        keep_dtype: Patterns of names whose tensors are not cast.
        include: Patterns of names to compare.
        exclude: Patterns of names to leave out.
        adapter: Turns the first one's names and tensors into those of the second; see `export_checkpoint`.
        trust_remote_code: Whether the code that a config names may be run.
        lora: What becomes of a PEFT model's state dict; see `export_checkpoint`.
        device: Where tensors are converted; default: the CPU.

    Returns:
        What came of it. A difference is no exception; `error()` returns one to raise.

    Raises:
        ExportError: One of them cannot be read.
    """
    one, other = open_two(
        first,
        second,
        base_model=base_model,
        prefix=prefix,
        dtype=dtype,
        keep_dtype=keep_dtype,
        include=include,
        exclude=exclude,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
        lora=lora,
        device=device,
    )
    return one.compare(other)
