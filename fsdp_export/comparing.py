"""Two checkpoints, opened so that they can be compared: each is read as an export would read it."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from .checkpoint import OpenedCheckpoint
from .errors import NotFoundError, PlanError
from .opening import open_checkpoint
from .paths import is_file
from .sinks.huggingface import ADAPTER_FILE

__all__ = ["open_two"]

_ADAPTER_FILES = (ADAPTER_FILE, "adapter_model.bin")


def open_two(
    first: str | PathLike[str],
    second: str | PathLike[str],
    *,
    prefix: str | None = None,
    adapter: Any = None,
    **options: Any,
) -> tuple[OpenedCheckpoint, OpenedCheckpoint]:
    """Open two checkpoints that are to be compared. Collective, as `open_checkpoint`.

    Where only one of them has a config, it stands in for that of the other, so that both get the names of the hub.

    Args:
        first: A checkpoint in any layout, a folder above it, or the folder of an adapter of PEFT.
        second: The other one.
        prefix: See `open_checkpoint`; of the first one alone.
        adapter: See there; of the first one alone.
        **options: What else `open_checkpoint` takes; of both.

    Raises:
        ExportError: One of them cannot be read on some rank; the same error is raised on all.
    """
    # A tensor that does not fit the config is a difference here, and no error.
    options["format"] = "safetensors"
    one = _open(first, {**options, "prefix": prefix, "adapter": adapter})
    other = _open(second, options)
    one_config, other_config = one.sidecars.config_file, other.sidecars.config_file
    if other_config is not None and adapter is None:
        one = _with_config(one, first, other_config, {**options, "prefix": prefix})
    if one_config is not None:
        other = _with_config(other, second, one_config, options)
    return one, other


def _open(path: str | PathLike[str], options: Mapping[str, Any]) -> OpenedCheckpoint:
    """Open a checkpoint, or the adapter in a folder that has nothing else."""
    try:
        return open_checkpoint(path, **options)
    except NotFoundError:
        adapter = next((Path(path, name) for name in _ADAPTER_FILES if is_file(Path(path, name))), None)
        if adapter is None:
            raise
    return open_checkpoint(adapter, **options)


def _with_config(
    checkpoint: OpenedCheckpoint, path: str | PathLike[str], config_file: Path, options: Mapping[str, Any]
) -> OpenedCheckpoint:
    """Open a checkpoint that has no config once more, with that of the other one, if it fits."""
    if checkpoint.sidecars.config is not None or checkpoint.is_lora:
        return checkpoint
    try:
        opened = _open(path, {**options, "base_model": config_file.parent})
    except PlanError as error:
        checkpoint.notes.append(f"{config_file} does not fit {checkpoint.source.folder}, where names stay: {error}")
        return checkpoint
    opened.notes.insert(0, f"{checkpoint.source.folder} has no config; that of {config_file} is taken")
    return opened
