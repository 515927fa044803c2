"""The metadata of a DCP checkpoint: which tensors there are, in which chunks, and where each chunk lies.

They are in one file, `.metadata`, or with `use_collectives=False` in one per rank, `__0.metadata` and so on, each of
which tells of what its rank wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ..errors import COPY_AGAIN, SourceError
from ..paths import read_file
from ..spec import Box
from .archive import Place, is_inside, is_possible
from .stored import Chunk, StoredTensor
from .tensor_pickle import dtype_names
from .unpickle import Call, Kind, Names, Record, is_count, is_counts, unpickle

__all__ = ["METADATA", "Metadata", "rank_of_metadata", "read_metadata"]

METADATA = ".metadata"
"""Name of the file; a folder with it is a DCP checkpoint."""

_RANK_METADATA = re.compile(r"__(\d{1,5})\.metadata")
_MAX_BYTES = 2 << 30
_MAX_EXTENSIONS = 16
_MAX_PATH_LENGTH = 100
_MAX_RATIO = 1 << 15  # of zstd: a block of 128 KiB that repeats a byte takes 4


def rank_of_metadata(file_name: str) -> int | None:
    """Return the rank whose metadata a file has, None for other files."""
    match = _RANK_METADATA.fullmatch(file_name)
    return int(match[1]) if match else None


class Metadata:
    """What the metadata say. Chunks are looked up tensor by tensor: most belong to the optimizer.

    Args:
        folder: The folder of the checkpoint.
        contents: What the metadata files hold, by their names, in the order of ranks.

    Attributes:
        file: The first file.
        subject: What messages about several of its entries name: the file, or the folder where there are several.
        tensors: Names of the tensors, in the order of the files.
        others: Names of what is no tensor.
        paths: For every name the nested keys under which the saved state dict had it; empty where it was saved flat
            by a planner that does not say.
        file_bytes: For every data file the bytes that it must have.
        transforms: For every tensor that extensions changed as it was written what they call themselves.

    Raises:
        SourceError: What a file says does not make sense.
    """

    def __init__(self, folder: Path, contents: Mapping[str, object]) -> None:
        self._parts = [_Part(folder / name, content) for name, content in contents.items()]
        self.file = self._parts[0].file
        self.subject = self.file if len(self._parts) == 1 else folder
        self.tensors = _union(part.tensors for part in self._parts)
        self.others = _union(part.others for part in self._parts)
        self.paths: dict[str, tuple[str, ...]] = {}
        self.file_bytes: dict[str, int] = {}
        self.transforms: dict[str, tuple[str, ...]] = {}
        for part in self._parts:
            self.paths |= part.paths
            self.transforms |= part.transforms
            for file, num_bytes in part.file_bytes.items():
                self.file_bytes[file] = max(self.file_bytes.get(file, 0), num_bytes)

    def tensor(self, key: str) -> StoredTensor:
        """Return a tensor with its chunks.

        Raises:
            SourceError: What the files say of it does not make sense, or they disagree.
        """
        parts = [part for part in self._parts if key in part.tensors]
        shape, dtype = parts[0].shape_and_dtype(key)
        places: dict[Box, list[Place]] = {}
        for part in parts:
            other_shape, other_dtype = part.shape_and_dtype(key)
            if (other_shape, other_dtype) != (shape, dtype):
                raise SourceError(
                    "ranks that saved different tensors under one name",
                    name=key,
                    file=self.subject,
                    expected=f"{list(shape)} {dtype} as in {parts[0].file.name}",
                    found=f"{list(other_shape)} {other_dtype} in {part.file.name}",
                    fix="Use another step",
                )
            for box in part.boxes(key, shape):
                if math.prod(box.shape):
                    places.setdefault(box, []).append(part.place(key, box, dtype))
        whole = Box.whole(shape)
        chunks = [
            Chunk(box, at[0], tuple(at[1:]) if box == whole else ())
            for box, at in sorted(places.items(), key=lambda item: item[0].start)
        ]
        return StoredTensor(key, shape, dtype, tuple(chunks))


class _Part:
    """What one metadata file says."""

    def __init__(self, file: Path, content: object) -> None:
        self.file = file
        state = self._state(content, "Metadata")
        self.tensors: dict[str, Record] = {}
        self.others: list[str] = []
        for key, entry in self._dict(state.get("state_dict_metadata"), "tensors").items():
            if not isinstance(key, str) or not isinstance(entry, Record):
                raise self._error("an entry without a name")
            if entry.kind == "BytesStorageMetadata":
                self.others.append(key)
            else:
                self.tensors[key] = entry
        if len(set(self.tensors.values())) < len(self.tensors):
            raise self._error("one entry under two names")
        self.paths = _paths(state.get("planner_data"))
        others = [key for key, path in self.paths.items() if ".".join(path) != key]
        if others:
            if len(others) < len(self.paths):
                raise self._error("a name that is not made of its keys", others[0])
            self.paths = {}  # of a planner that joins them otherwise
        self.transforms: dict[str, tuple[str, ...]] = {}
        self.file_bytes: dict[str, int] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for index, info in self._dict(state.get("storage_data"), "places").items():
            self._add_place(self._state(index, "MetadataIndex"), self._state(info, "_StorageInfo"))

    def shape_and_dtype(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the global shape and the dtype of a tensor."""
        state = self._state(self.tensors[key], "TensorStorageMetadata", key)
        properties = state.get("properties")
        if not isinstance(properties, Record) or not isinstance(properties.state, tuple) or not properties.state:
            raise self._error("no dtype", key)
        dtype = properties.state[0]
        if not isinstance(dtype, torch.dtype):
            raise self._error("no dtype", key)
        return self._sizes(state.get("size"), key), dtype

    def boxes(self, key: str, shape: tuple[int, ...]) -> Iterable[Box]:
        """Return the chunks of a tensor, each once."""
        records = self._state(self.tensors[key], "TensorStorageMetadata", key).get("chunks")
        if not isinstance(records, list):
            raise self._error("no chunks", key)
        return dict.fromkeys(self._box(record, shape, key) for record in records)

    def place(self, key: str, box: Box, dtype: torch.dtype) -> Place:
        """Return where a chunk of a tensor lies."""
        place = self._places.get((key, box.start))
        if place is None:
            raise self._error(f"no data file of the chunk at {box.start}", key)
        num_bytes = math.prod(box.shape) * dtype.itemsize
        if place.length * (_MAX_RATIO if key in self.transforms else 1) < num_bytes:
            raise self._error(f"{place.length:,} bytes of data of the {num_bytes:,} of the chunk at {box.start}", key)
        return place

    def _box(self, record: object, shape: tuple[int, ...], key: str) -> Box:
        state = self._state(record, "ChunkStorageMetadata", key)
        start, sizes = self._sizes(state.get("offsets"), key), self._sizes(state.get("sizes"), key)
        if not len(start) == len(sizes) == len(shape):
            raise self._error(f"a chunk of {len(sizes)} dims of a tensor of {len(shape)} dims", key)
        stop = tuple(begin + size for begin, size in zip(start, sizes, strict=True))
        if any(end > size for end, size in zip(stop, shape, strict=True)):
            raise self._error(f"a chunk up to {stop} of a tensor of shape {shape}", key)
        return Box(start, stop)

    def _add_place(self, index: Mapping[str, object], info: Mapping[str, object]) -> None:
        key, start = index.get("fqn"), index.get("offset")
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(key, str) or not isinstance(file, str):
            raise self._error("a place without a name")
        if file not in self.file_bytes and not is_inside(file):
            raise self._error("a data file outside of the folder")
        if not is_count(offset) or not is_count(length):
            raise self._error("a place without numbers", key)
        descriptors = info.get("transform_descriptors")
        if descriptors:
            if not isinstance(descriptors, list) or not all(isinstance(text, str) for text in descriptors):
                raise self._error("extensions without names", key)
            if len(descriptors) > _MAX_EXTENSIONS:
                raise self._error(f"{len(descriptors):,} extensions", key)
            self.transforms[key] = tuple(descriptors)
        self._places[key, None if start is None else self._sizes(start, key)] = Place(file, offset, length)
        self.file_bytes[file] = max(self.file_bytes.get(file, 0), offset + length)

    def _state(self, record: object, kind: str, key: str | None = None) -> Mapping[str, object]:
        if isinstance(record, Record) and record.kind == kind and isinstance(record.state, dict):
            return record.state
        raise self._error(f"no {kind}", key)

    def _dict(self, value: object, what: str) -> Mapping[object, object]:
        if isinstance(value, dict):
            return value
        raise self._error(f"no {what}")

    def _sizes(self, value: object, key: str) -> tuple[int, ...]:
        if is_counts(value) and is_possible(value):
            return value
        raise self._error("a size that is none", key)

    def _error(self, found: str, key: str | None = None) -> SourceError:
        what = "metadata that make no sense"
        return SourceError(what, name=key, file=self.file, found=found, fix=COPY_AGAIN)


def _paths(planner_data: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(planner_data, dict):
        return {}
    paths = {}
    for key, path in planner_data.items():
        is_path = isinstance(path, tuple) and 0 < len(path) <= _MAX_PATH_LENGTH
        if not isinstance(key, str) or not is_path or not all(isinstance(part, (str, int)) for part in path):
            return {}
        paths[key] = tuple(map(str, path))
    return paths


def _union(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for part in names for name in part))


def read_metadata(folder: Path, names: Iterable[str]) -> Metadata:
    """Read metadata files, without torch.distributed and without running anything of them.

    Args:
        folder: The folder of the checkpoint.
        names: Its metadata files, in the order of ranks.

    Raises:
        SourceError: One cannot be read, or is not understood.
        UnsafeInputError: One names what no checkpoint needs.
    """
    return Metadata(folder, {name: _read(folder / name) for name in names})


def _read(file: Path) -> object:
    try:
        data = read_file(file, _MAX_BYTES)
    except OSError as error:
        raise SourceError("metadata that cannot be read", file=file, found=error.strerror or error) from error
    return unpickle(data, _NAMES, file=file)


def _size(values: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(values)


def _ignore(*_: object) -> None:
    """Stand in for paths, layouts and memory formats, none of which say anything about the tensors."""


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_KINDS = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
)
_NAMES: Names = {
    **{f"{_CHECKPOINT}.{kind}": Kind(kind) for kind in _KINDS},
    f"{_CHECKPOINT}._MEM_FORMAT_ENCODING": Call(_ignore),
    f"{_SHARDED_TENSOR}.TensorProperties": Kind("TensorProperties"),
    f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING": Call(_ignore),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Kind("_StorageInfo"),
    "torch.Size": Call(_size),
    "torch.serialization._get_layout": Call(_ignore),
    # The module of paths is another one in Python 3.13.
    **{
        f"{module}.{name}": Call(_ignore)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **dtype_names(),
}
