"""Which safetensors files of a folder are its weights, and whether all of them are there."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import COPY_AGAIN, NotFoundError, SourceError, UsageError, listing
from ..paths import is_file, is_folder, read_file
from .archive import is_inside
from .safetensors_file import parse_json

__all__ = ["WeightFiles", "find_weights", "holds_shards", "is_part", "read_index", "recognizes"]

_log = logging.getLogger("fsdp_export")

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = f"{_SUFFIX}.index.json"
_MODEL = "model"
_ADAPTER = re.compile(r"adapter_model.*")
# torch's writer: shard-<rank>-model-<file>-of-<files>. Others number whole tensors' files, before or behind the suffix.
_SHARD = re.compile(r"shard-(\d{1,6})-.+\.safetensors")
_NUMBERED = re.compile(r"(.+?)(?:\.safetensors)?-(\d{1,6})-of-(\d{1,6})\.safetensors")
_OF_RANK = re.compile(r"(?:.+[-_.])?rank[-_]?(\d{1,5})(?:[-_.].+)?\.safetensors")
# prime-rl gives its files their final names when all ranks have written theirs.
_TEMPORARY = "tmp-"
_MAX_FILES = 99_999
_MAX_INDEX_BYTES = 256 << 20
_NAME_ANOTHER = "Name the folder that has them"
_COPY_OTHERS = "Copy the others here, or use another step"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder.

    Attributes:
        kind: What they are, for people.
        names: Their names, in order.
        are_shards: Whether ranks wrote them, so that a tensor may be in several.
        index_file: Name of the index, if there is one.
        index: For every tensor the file that the index says has it.
    """

    kind: str
    names: tuple[str, ...]
    are_shards: bool = False
    index_file: str | None = None
    index: Mapping[str, str] | None = None


def recognizes(file_names: Collection[str]) -> bool:
    """Tell from the names of a folder's files whether it has weights in safetensors; an adapter's do not count."""
    return any(name.endswith(_INDEX_SUFFIX) or _is_weights(name) for name in file_names)


def holds_shards(file_names: Collection[str]) -> bool:
    """Tell from the names of a folder's files whether torch's Hugging Face writer left one rank's shards or more."""
    return any(map(_SHARD.fullmatch, file_names))


def is_part(file_name: str) -> bool:
    """Tell from a file's name whether it is one of several that make up a checkpoint."""
    return any(pattern.fullmatch(file_name) for pattern in (_SHARD, _NUMBERED, _OF_RANK))


def find_weights(path: Path) -> WeightFiles:
    """Find the weight files of a folder and check that all of them are there.

    Args:
        path: The folder; or an index in it, or one safetensors file, which is taken alone.

    Raises:
        NotFoundError: There are none.
        UsageError: Several sets could be meant.
        SourceError: Some are missing, are of several saves, or are not what the index says.
    """
    if path.name.endswith(_SUFFIX) and is_file(path):
        return WeightFiles("safetensors file", (path.name,))
    folder = path.parent if path.name.endswith(_INDEX_SUFFIX) else path
    names = _file_names(folder)
    weights = sorted(filter(_is_weights, names))
    shards = [name for name in weights if _SHARD.fullmatch(name)]
    whole = [name for name in weights if _stem(name) == _MODEL]
    index_files = [path.name] if folder != path else [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if shards:
        others = whole or [name for name in weights if name not in shards]
        if others:
            raise _two_saves(folder, [shards[0], others[0]])
        return WeightFiles("shards of torch's Hugging Face writer", tuple(shards), are_shards=True)
    if index_files:
        return _from_index(folder, _choose_index(folder, index_files), names)
    if not weights:
        found = listing(names) or "nothing"
        raise NotFoundError("no weights in safetensors", file=folder, found=found, fix=_NAME_ANOTHER)
    return _without_index(folder, weights)


def _is_weights(name: str) -> bool:
    return name.endswith(_SUFFIX) and not _ADAPTER.fullmatch(name)


def _stem(name: str) -> str:
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name.removesuffix(_SUFFIX)


def _file_names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            # What stands in the place of a shard is refused for what it is.
            return sorted(entry.name for entry in entries if not is_folder(entry) or _SHARD.fullmatch(entry.name))
    except OSError as error:
        found = error.strerror or error
        raise NotFoundError("no folder of weights", file=folder, found=found, fix=_NAME_ANOTHER) from error


def _choose_index(folder: Path, index_files: Sequence[str]) -> str:
    if _MODEL + _INDEX_SUFFIX in index_files:
        return _MODEL + _INDEX_SUFFIX
    if len(index_files) > 1:
        raise UsageError("several indexes", file=folder, found=listing(index_files), fix="Name one of them")
    return index_files[0]


def _from_index(folder: Path, index_file: str, names: Sequence[str]) -> WeightFiles:
    index = read_index(folder / index_file)
    files = sorted(set(index.values()))
    foreign = [file for file in files if not file.endswith(_SUFFIX)]
    if foreign:
        raise SourceError(
            "an index that points to files that are no safetensors",
            file=folder / index_file,
            found=listing(foreign),
            fix="Name a folder whose index lists safetensors files",
        )
    missing = [file for file in files if not is_file(folder / file)]
    if missing:
        raise _missing(folder, missing, len(files))
    stems = set(map(_stem, files))
    stale = [name for name in names if _is_weights(name) and name not in files and _stem(name) in stems]
    if stale:
        raise SourceError(
            "weight files that the index does not list",
            file=folder / index_file,
            expected=listing(files),
            found=f"also {listing(stale)}",
            fix="They are of two saves: move those away that are not meant",
        )
    return WeightFiles("Hugging Face folder", tuple(files), index_file=index_file, index=index)


def read_index(file: Path) -> dict[str, str]:
    """Read an index: for every tensor the file that has it.

    Raises:
        SourceError: It cannot be read, or is not understood.
    """
    try:
        content = parse_json(read_file(file, _MAX_INDEX_BYTES))
    except OSError as error:
        raise SourceError("an index that cannot be read", file=file, found=error.strerror or error) from error
    except ValueError as error:
        raise _damaged_index(file, error) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged_index(file, "no weight_map")
    if not all(isinstance(name, str) and is_inside(name) for name in weight_map.values()):
        raise _damaged_index(file, "files outside of the folder")
    return weight_map


def _damaged_index(file: Path, found: object) -> SourceError:
    return SourceError("a damaged index", file=file, found=found, fix=COPY_AGAIN)


def _without_index(folder: Path, weights: Sequence[str]) -> WeightFiles:
    """Choose by names: those called model, or the only ones that there are."""
    by_stem: dict[str, list[str]] = {}
    for name in weights:
        by_stem.setdefault(_stem(name), []).append(name)
    of_ranks = [name for name in weights if _OF_RANK.fullmatch(name)]
    if of_ranks and len(of_ranks) < len(weights) and _MODEL in by_stem:
        raise _two_saves(folder, [of_ranks[0], by_stem[_MODEL][0]])
    if len(of_ranks) == len(weights):
        for files in by_stem.values():
            _check_numbers(folder, files)
        if any(name.startswith(_TEMPORARY) for name in weights):
            _log.warning("%s: a save that did not finish; what other ranks had to write may be missing", folder)
        return WeightFiles("files of ranks that hold whole tensors", tuple(weights), are_shards=True)
    if _MODEL not in by_stem and len(by_stem) > 1:
        fix = "Name one of them, or the index"
        raise UsageError("several weight files and no index", file=folder, found=listing(weights), fix=fix)
    files = by_stem.get(_MODEL) or list(weights)
    _check_numbers(folder, files)
    return WeightFiles("Hugging Face folder", tuple(files))


def _check_numbers(folder: Path, files: Sequence[str]) -> None:
    """Refuse files of one stem that are not exactly `1-of-N` to `N-of-N`, or a single one without a number."""
    numbers = [(int(match[2]), int(match[3])) for name in files if (match := _NUMBERED.fullmatch(name))]
    totals = {total for _, total in numbers}
    if len(numbers) < len(files) or len(totals) > 1:
        if len(files) > 1:
            raise _two_saves(folder, files)
        return
    total, here = max(totals), {number for number, _ in numbers}
    if total > _MAX_FILES:
        raise SourceError(f"one of {total:,} files, which are more than can be,", file=folder / files[0])
    absent = [number for number in range(1, total + 1) if number not in here]
    if absent:
        raise _missing(folder, [_with_number(files[0], number) for number in absent], total)
    if len(files) > total:
        raise _two_saves(folder, files)


def _with_number(name: str, number: int) -> str:
    match = _NUMBERED.fullmatch(name)
    assert match
    width = match.end(2) - match.start(2)
    return f"{name[: match.start(2)]}{number:0{width}}{name[match.end(2) :]}"


def _missing(folder: Path, missing: Collection[str], total: int) -> SourceError:
    return SourceError(
        f"missing {listing(missing)}",
        file=folder,
        expected=f"{total:,} weight files",
        found=f"{total - len(missing):,}",
        fix=_COPY_OTHERS,
    )


def _two_saves(folder: Path, files: Iterable[str]) -> SourceError:
    fix = "Move those away that are not meant"
    return SourceError("weights of two saves", file=folder, found=listing(files), fix=fix)
