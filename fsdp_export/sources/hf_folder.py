"""A folder of safetensors: a Hugging Face checkpoint, or what ranks wrote of one, read row by row.

torch's Hugging Face writer, and NeMo Automodel which is built on it, leave shards that say where in the full tensors
they begin, and beside them perhaps the same tensors put together: in `consolidated/` below the shards, or above a
`sharded/`. What is put together is taken if it is complete and agrees with the shards, else the shards are. Of tensors
that only begin otherwise nothing tells which are newer, so they are refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path

import torch

from ..errors import ExportError, NotFoundError, SourceError, UsageError, listing
from ..paths import is_file, is_folder
from ..spec import Box
from ..table import counted
from .archive import DataFiles, Place
from .dcp_model import ModelState, find_model, name_keys
from .hf_files import WeightFiles, find_weights, holds_shards, is_part, read_index, recognizes
from .safetensors_file import Entry, Header, dense, read_header
from .stored import Chunk, Located, StoredSource, StoredTensor, check_cover

__all__ = ["HfFolderSource", "names_in"]

_log = logging.getLogger("fsdp_export")

_ONLY_FILE = "model.safetensors"
_WHOLE_FOLDER = "consolidated"
_SHARDS_FOLDER = "sharded"
_COMPARE_BYTES = 4096
_SAVE_OTHERWISE = "Save with torch's HuggingFaceStorageWriter, or whole tensors"
_OTHER_SAVES = "The files are of different saves; use another step"


def names_in(folder: Path) -> frozenset[str]:
    """Return the names of the tensors of a Hugging Face folder: of its index, or only file.

    There are none where neither can be read. The files that an index lists need not be there.
    """
    index = folder / "model.safetensors.index.json"
    try:
        return frozenset(read_index(index) if index.is_file() else read_header(DataFiles(folder), _ONLY_FILE).entries)
    except ExportError:
        return frozenset()


class HfFolderSource(StoredSource):
    """The tensors of a folder of safetensors. Every rank can read all of them.

    Args:
        folder: The folder; or an index in it, or a safetensors file, whose folder is read if it is one of several.
        prefix: What the names of the tensors to export begin with. Default: a Hugging Face folder is exported as it
            is; what wraps the model in shards is found out.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Raises:
        NotFoundError: There are no weights, or none below the prefix.
        UsageError: Several sets of files could be meant, or what is put together is of another save than the shards.
        SourceError: Files are missing, truncated, damaged or of several saves, or shards leave holes or overlap.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefix: str | None = None,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        weights = _choose(folder)
        model = _find_model(weights, prefix)
        tensors = {name: weights.tensors[model.keys[name]] for name in sorted(model.keys, key=_natural)}
        files = weights.files
        super().__init__(files.folder, files, tensors, partial(_locate, files), ranks=ranks, rank=rank, device=device)
        self.skipped = tuple(sorted(weights.tensors.keys() - set(model.keys.values())))
        num_files = counted(len(weights.found.names), "file")
        self.description = self.describe(weights.found.kind, num_files, prefix=model.prefix)


def _locate(files: DataFiles, tensor: StoredTensor, box: Box, place: Place) -> Located:
    return files, dense(place.file, place.offset, tensor.dtype, box.shape)


@dataclass(frozen=True)
class _Weights:
    """What is in the weight files of a folder."""

    files: DataFiles
    found: WeightFiles
    tensors: dict[str, StoredTensor]

    def as_put_together(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {key: (tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()}


@dataclass
class _Entries:
    """What shards hold, as `find_model` wants it."""

    file: Path
    tensors: list[str]
    paths: dict[str, tuple[str, ...]]


def _find_model(weights: _Weights, prefix: str | None) -> ModelState:
    """Find the model's tensors: all of a Hugging Face folder, and in shards what is not of an optimizer."""
    folder, found = weights.files.folder, weights.found
    if prefix is None and not found.are_shards:
        return ModelState("", name_keys(folder, list(weights.tensors)))
    entries = _Entries(folder / found.names[0], list(weights.tensors), {})
    try:
        return find_model(entries, prefix)
    except UsageError:  # names that begin with `model.`, as those on the hub do
        return find_model(entries, "")


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(len(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _choose(path: Path) -> _Weights:
    """Read the headers of a folder and, where ranks wrote shards, of the same tensors put together."""
    if is_part(path.name) and is_file(path):
        path = path.parent
    if holds_shards(_file_names(path)):
        shards_folder, whole_folder = path, path / _WHOLE_FOLDER
    else:
        shards_folder, whole_folder = path / _SHARDS_FOLDER, path
    if not holds_shards(_file_names(shards_folder)) or not recognizes(_file_names(whole_folder)):
        return _read(path)
    try:
        shards = _read(shards_folder)
    except SourceError as error:
        _log.warning("shards are left alone for what is put together in %s: %s", whole_folder, error)
        return _read(whole_folder)
    # torch puts a tensor without dims together as a zero.
    if all(tensor.shape for tensor in shards.tensors.values()):
        try:
            whole = _read(whole_folder)
            if whole.as_put_together() == shards.as_put_together():
                _check_same_save(whole, shards)
                return whole
            found = "other names, shapes or dtypes than in the shards"
        except SourceError as error:
            found = str(error)
        _log.warning("shards are read, for what is put together of them in %s has: %s", whole_folder, found)
    return shards


def _check_same_save(whole: _Weights, shards: _Weights) -> None:
    """Refuse tensors that begin otherwise than in the shards of which they seem to have been put together."""
    for key, tensor in shards.tensors.items():
        if not tensor.chunks:
            continue
        first, place = tensor.chunks[0], whole.tensors[key].chunks[0].place
        num_bytes = min(first.box.shape[-1] * tensor.dtype.itemsize, _COMPARE_BYTES)
        beginning = shards.files.read(first.place.file, first.place.offset, num_bytes)
        if whole.files.read(place.file, place.offset, num_bytes) != beginning:
            raise UsageError(
                "weights that are not those of the shards beside them",
                name=key,
                file=whole.files.folder,
                found=f"other values than in {shards.files.folder}",
                fix="One of the two is of another save: move away what is not meant",
            )


def _file_names(folder: Path) -> list[str]:
    try:
        return [file.name for file in folder.iterdir()]
    except OSError:
        return []


def _read(path: Path) -> _Weights:
    """Read the headers of the weight files, and check that they fit together."""
    found = find_weights(path)
    files = DataFiles(path if is_folder(path) else path.parent)
    headers = {name: read_header(files, name) for name in found.names}
    for name, header in headers.items():
        if header.starts is None and holds_shards([name]):
            what = "a shard that does not say which part of its tensors it has"
            raise SourceError(what, file=files.folder / name, fix=_SAVE_OTHERWISE)
    if found.index is not None:
        _check_index(files.folder, found, headers)
    pieces: dict[str, dict[str, Entry]] = {}
    for name, header in headers.items():
        for key, entry in header.entries.items():
            pieces.setdefault(key, {})[name] = entry
    if not pieces:
        raise NotFoundError("no tensor", file=path, fix="Name the folder of the model's checkpoint")
    return _Weights(files, found, {key: _put_together(files.folder, key, of, headers) for key, of in pieces.items()})


def _check_index(folder: Path, found: WeightFiles, headers: Mapping[str, Header]) -> None:
    """Refuse an index that says anything else than the files."""
    assert found.index is not None
    assert found.index_file is not None
    listed = set(found.index.items())
    stored = {(key, name) for name, header in headers.items() for key in header.entries}
    for what, surplus in (
        ("tensors that the index lists and its files do not have", listed - stored),
        ("tensors that the files have and the index does not list", stored - listed),
    ):
        if surplus:
            texts = listing(starmap("{!r} ({})".format, surplus))
            raise SourceError(what, file=folder / found.index_file, found=texts, fix=_OTHER_SAVES)


def _put_together(folder: Path, key: str, entries: Mapping[str, Entry], headers: Mapping[str, Header]) -> StoredTensor:
    """Find the shape of a tensor from its blocks, and check that they fill it."""
    dtypes = {entry.dtype for entry in entries.values()}
    starts: dict[str, tuple[int, ...]] = {}
    for name, entry in entries.items():
        known = headers[name].starts
        if known is None and len(entries) > 1:
            raise SourceError(
                "a tensor in several files that do not say which part of it they have",
                name=key,
                file=folder,
                found=listing(entries),
                fix=_SAVE_OTHERWISE,
            )
        starts[name] = known[key] if known is not None else (0,) * len(entry.shape)
    if len(dtypes) > 1 or len({len(start) for start in starts.values()}) > 1:
        found = listing(f"{list(entry.shape)} {entry.dtype} in {name}" for name, entry in entries.items())
        raise SourceError(
            "shards of different tensors under one name", name=key, file=folder, found=found, fix=_OTHER_SAVES
        )
    boxes = {
        name: Box(starts[name], tuple(map(sum, zip(starts[name], entry.shape, strict=True))))
        for name, entry in entries.items()
    }
    shape = _extent(boxes.values())
    chunks = [Chunk(boxes[name], entry.place) for name, entry in entries.items() if math.prod(entry.shape)]
    chunks.sort(key=lambda chunk: chunk.box.start)
    tensor = StoredTensor(key, shape, dtypes.pop(), tuple(chunks))
    check_cover(tensor, folder)
    return tensor


def _extent(boxes: Collection[Box]) -> tuple[int, ...]:
    """Return the shape of the tensor that blocks reach to; where one is empty says nothing unless all are."""
    filled = [box for box in boxes if math.prod(box.shape)]
    return tuple(map(max, zip(*(box.stop for box in filled or boxes), strict=True)))
