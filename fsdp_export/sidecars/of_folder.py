"""The sidecars of a checkpoint on disk: files of its base model, of its folder, or of a folder around it.

They are copied byte for byte; in a config only the keys that must change are edited, because transformers 5 re-saves
configs in a form that transformers 4 reads wrongly and without an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config_json import class_edits, parse_object
from ..errors import NotFoundError, SourceError
from ..paths import read_file
from .custom_code import code_files, missing_code
from .origins import (
    CONFIG,
    GENERATION_CONFIG,
    find,
    locate_base,
    processor_files,
    search_folders,
    tokenizer_files,
)
from .sidecar import Origin, OriginKind, Sidecars, changed_keys
from .tokenizers import add_tokenizer

__all__ = ["from_folder", "origin_in", "read_config"]

Places = Sequence[tuple[Path, Origin]]


def from_folder(
    folder: Path | None, base_model: str | Path | None = None, *, tokenizer: object | None = None
) -> Sidecars:
    """Decide on the sidecars of a checkpoint on disk.

    Each kind (config, generation config, tokenizer, processor) is taken whole from the first place that has it: the
    base model, since it was named; the folder; a folder above it, or one of the folders in these in which trainers
    keep such files.

    Args:
        folder: The checkpoint.
        base_model: The folder or hub id of the model that was trained. Asked of the hub only if the cache lacks it.
        tokenizer: A tokenizer or processor to save instead of the one found.

    Raises:
        SourceError: A config is not readable, or not JSON.
        NotFoundError: There is no such base model.
    """
    sidecars = Sidecars()
    places = [(place, origin_in(place, folder)) for place in search_folders(folder)] if folder is not None else []
    if base_model is not None:
        base, warning = locate_base(base_model)
        sidecars.base_model = Origin.elsewhere("base model", base)
        places.insert(0, (base, sidecars.base_model))
        sidecars.warnings += [warning] if warning else []
    named = [str(base_model)] if base_model is not None else []
    searched = ", ".join([*named, f"{folder} or above it"] if folder is not None else named) or "no folder"
    _add_found_config(sidecars, places)
    if sidecars.config is None and base_model is not None:
        fix = "Give the folder or hub id of the model that was trained, or leave it out to write one safetensors file"
        raise NotFoundError(f"the base model {os.fspath(base_model)!r} has no config", expected=CONFIG, fix=fix)
    if sidecars.config is None:
        way_out = "; give --base-model for a Hugging Face folder in place of one safetensors file"
        sidecars.missing.append(f"{CONFIG}: not in {searched}{way_out}")
    if not _add_first(sidecars, places, lambda place: find(place, GENERATION_CONFIG)):
        sidecars.missing.append(f"{GENERATION_CONFIG}: not in {searched}")
    if tokenizer is not None:
        add_tokenizer(sidecars, tokenizer)
    elif not _add_first(sidecars, places, tokenizer_files):
        sidecars.missing.append("tokenizer: none was found")
    _add_first(sidecars, places, processor_files)
    return sidecars


def origin_in(place: Path, checkpoint: Path) -> Origin:
    """Return the origin of what is found in a place, as seen from a checkpoint's folder."""
    relative = Path(os.path.relpath(place, checkpoint.resolve())).as_posix()
    kind: OriginKind = "parent" if relative.startswith("..") else "source"
    return Origin(kind, place, relative if relative != "." else "")


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file.

    Raises:
        SourceError: It is not readable, or no JSON object.
    """
    try:
        return parse_object(read_file(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError("a config that cannot be read", file=path, expected="a JSON object", found=reason) from error


def _add_found_config(sidecars: Sidecars, places: Places) -> None:
    """Add the nearest file that is a model's config; a trainer's own file of that name has no model type."""
    for place, origin in places:
        path = place / CONFIG
        config = read_config(path) if os.path.lexists(path) else {}
        if {"model_type", "architectures"} & config.keys():
            sidecars.add({CONFIG: path}, origin)
            sidecars.config, sidecars.config_file = config, path
            if edits := class_edits(config, None):
                sidecars.edit_config(edits)
                sidecars.warnings.append(f"{CONFIG} differs from that of {place} in {', '.join(changed_keys(edits))}")
            code = code_files(place, sidecars.config)
            sidecars.add(code, origin)
            lacking = missing_code(sidecars.config, code)
            sidecars.missing += [f"{name}: {CONFIG} names it, and {place} lacks it" for name in lacking]
            return


def _add_first(sidecars: Sidecars, places: Places, find_files: Callable[[Path], dict[str, Path]]) -> bool:
    """Add the files of one kind from the nearest place that has any, none from another; return whether there is one."""
    for place, origin in places:
        if files := find_files(place):
            sidecars.add(files, origin)
            return True
    return False
