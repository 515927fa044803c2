"""The `.metadata` file of a DCP checkpoint: which tensors there are, in which chunks, and where each chunk lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from ..errors import SourceError
from ..spec import Box
from .archive import Place
from .tensor_pickle import dtype_names
from .unpickle import Call, Kind, Names, Record, is_count, is_counts, unpickle

__all__ = ["METADATA", "Chunk", "Metadata", "StoredTensor", "read_metadata"]

METADATA = ".metadata"
"""Name of the file; a folder with it is a DCP checkpoint."""

_MAX_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and where it lies."""

    box: Box
    place: Place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies on disk.

    Attributes:
        key: Its name in the checkpoint.
        shape: Its global shape.
        dtype: Its dtype.
        chunks: Its blocks that are not empty, in the order of the tensor, each once.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Metadata:
    """What a `.metadata` file says. Chunks are looked up tensor by tensor: most belong to the optimizer.

    Attributes:
        file: The file.
        tensors: Names of the tensors, in the order of the file.
        others: Names of what is no tensor.
        paths: For every name the nested keys under which the saved state dict had it; empty where it was saved flat
            by a planner that does not say.
        file_bytes: For every data file the bytes that it must have.
    """

    def __init__(self, file: Path, content: object) -> None:
        self.file = file
        state = self._state(content, "Metadata")
        entries = self._dict(state.get("state_dict_metadata"), "tensors")
        self._tensors: dict[str, Record] = {}
        self.others: list[str] = []
        for key, entry in entries.items():
            if not isinstance(key, str) or not isinstance(entry, Record):
                raise self._error("an entry without a name")
            if entry.kind == "BytesStorageMetadata":
                self.others.append(key)
            else:
                self._tensors[key] = entry
        self.tensors = list(self._tensors)
        self.paths = self._read_paths(state.get("planner_data"))
        self._places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        self._transformed: set[str] = set()
        self.file_bytes: dict[str, int] = {}
        for index, info in self._dict(state.get("storage_data"), "places").items():
            self._add_place(self._state(index, "MetadataIndex"), self._state(info, "_StorageInfo"))

    def tensor(self, key: str) -> StoredTensor:
        """Return a tensor with its chunks.

        Raises:
            SourceError: What the file says of it does not make sense.
        """
        if key in self._transformed:
            fix = "Save without the extension"
            what = "a tensor compressed or encrypted by an extension, not supported yet,"
            raise SourceError(what, name=key, file=self.file, fix=fix)
        state = self._state(self._tensors[key], "TensorStorageMetadata", key)
        properties = state.get("properties")
        if not isinstance(properties, Record) or not isinstance(properties.state, tuple) or not properties.state:
            raise self._error("no dtype", key)
        dtype = properties.state[0]
        if not isinstance(dtype, torch.dtype):
            raise self._error("no dtype", key)
        shape = self._sizes(state.get("size"), key)
        records = state.get("chunks")
        if not isinstance(records, list):
            raise self._error("no chunks", key)
        boxes = {self._box(record, shape, key) for record in records}
        chunks = [Chunk(box, self._place(key, box)) for box in boxes if math.prod(box.shape)]
        chunks.sort(key=lambda chunk: chunk.box.start)
        return StoredTensor(key, shape, dtype, tuple(chunks))

    def _box(self, record: object, shape: tuple[int, ...], key: str) -> Box:
        state = self._state(record, "ChunkStorageMetadata", key)
        start, sizes = self._sizes(state.get("offsets"), key), self._sizes(state.get("sizes"), key)
        if not len(start) == len(sizes) == len(shape):
            raise self._error(f"a chunk of {len(sizes)} dims of a tensor of {len(shape)} dims", key)
        stop = tuple(begin + size for begin, size in zip(start, sizes, strict=True))
        if any(end > size for end, size in zip(stop, shape, strict=True)):
            raise self._error(f"a chunk up to {stop} of a tensor of shape {shape}", key)
        return Box(start, stop)

    def _place(self, key: str, box: Box) -> Place:
        place = self._places.get((key, box.start))
        if place is None:
            raise self._error(f"no data file of the chunk at {box.start}", key)
        return place

    def _add_place(self, index: Mapping[str, object], info: Mapping[str, object]) -> None:
        key, start = index.get("fqn"), index.get("offset")
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(key, str) or not isinstance(file, str):
            raise self._error("a place without a name")
        if file not in self.file_bytes and not _is_inside(file):
            raise self._error("a data file outside of the folder")
        if not is_count(offset) or not is_count(length):
            raise self._error("a place without numbers", key)
        if info.get("transform_descriptors"):
            self._transformed.add(key)
        self._places[key, None if start is None else self._sizes(start, key)] = Place(file, offset, length)
        self.file_bytes[file] = max(self.file_bytes.get(file, 0), offset + length)

    def _read_paths(self, planner_data: object) -> dict[str, tuple[str, ...]]:
        if not isinstance(planner_data, dict):
            return {}
        paths = {}
        for key, path in planner_data.items():
            is_path = isinstance(path, tuple) and path and all(isinstance(part, (str, int)) for part in path)
            if not isinstance(key, str) or not is_path:
                return {}
            paths[key] = tuple(map(str, path))
        return paths

    def _state(self, record: object, kind: str, key: str | None = None) -> Mapping[str, object]:
        if isinstance(record, Record) and record.kind == kind and isinstance(record.state, dict):
            return record.state
        raise self._error(f"no {kind}", key)

    def _dict(self, value: object, what: str) -> Mapping[object, object]:
        if isinstance(value, dict):
            return value
        raise self._error(f"no {what}")

    def _sizes(self, value: object, key: str) -> tuple[int, ...]:
        if is_counts(value):
            return value
        raise self._error("a size that is none", key)

    def _error(self, found: str, key: str | None = None) -> SourceError:
        fix = "Copy the file here again, or use another step"
        return SourceError("metadata that make no sense", name=key, file=self.file, found=found, fix=fix)


def _is_inside(file: str) -> bool:
    """Tell whether a name is a file's below the folder."""
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and file.isprintable()


def read_metadata(folder: Path) -> Metadata:
    """Read the `.metadata` file of a folder, without torch.distributed and without running anything of it.

    Raises:
        SourceError: It cannot be read, or is not understood.
        UnsafeInputError: It names what no checkpoint needs.
    """
    file = folder / METADATA
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise SourceError("metadata too large to be true", file=file, found=f"{file.stat().st_size:,} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise SourceError("metadata that cannot be read", file=file, found=error.strerror or error) from error
    return Metadata(file, unpickle(data, _NAMES, file=file))


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
