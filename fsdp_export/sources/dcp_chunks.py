"""The data files of a DCP checkpoint: where in them the elements of a chunk are.

A chunk is an archive of `torch.save`, plain or compressed by an extension, or with `SerializationFormat.SAFETENSORS` a
tensor of the safetensors file that begins where the metadata say and ends with the data file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from ..errors import SourceError
from ..spec import Box
from .archive import DataFiles, Place, Strided
from .safetensors_file import Header, dense, read_header
from .stored import Chunk, Located, StoredTensor
from .torch_archive import locate
from .zstd import DESCRIPTOR, unpack

__all__ = ["ChunkFiles"]

_MAX_LOCATED = 16_384
_MAX_HEADERS = 64
_MAX_UNPACKED = 2
_ARCHIVE_BYTES = 1 << 20  # what an archive may have beside its tensor


class ChunkFiles:
    """The data files of a folder.

    Args:
        folder: The folder.
        transforms: For every tensor that extensions changed as it was written what they call themselves.
    """

    def __init__(self, folder: Path, transforms: Mapping[str, tuple[str, ...]]) -> None:
        self._files = DataFiles(folder)
        self._transforms = transforms
        read = lru_cache(_MAX_HEADERS)(partial(read_header, self._files))
        self._find = lru_cache(_MAX_LOCATED)(partial(_find, self._files, read))
        self._unpack = lru_cache(_MAX_UNPACKED)(partial(unpack, self._files))

    def locate(self, tensor: StoredTensor, box: Box, place: Place) -> Located:
        """Find the elements of a chunk.

        Args:
            tensor: The tensor it is of.
            box: Its block of the tensor.
            place: Where it lies.

        Raises:
            SourceError: It cannot be read, or is not what the metadata say.
            UnsafeInputError: Its pickle names what no tensor needs.
        """
        if tensor.key not in self._transforms:
            return self._files, self._find(_Wanted(tensor.key, tensor.dtype, box, place))
        self.check_transforms(tensor)
        max_bytes = math.prod(box.shape) * tensor.dtype.itemsize + _ARCHIVE_BYTES
        unpacked, inner = self._unpack(place, max_bytes, tensor.key)
        stored = locate(unpacked, inner, tensor.key)
        _Wanted(tensor.key, tensor.dtype, box, place).check(stored, self._files)
        return unpacked, stored

    def probe(self, tensors: Iterable[StoredTensor]) -> None:
        """Open one chunk, so that what cannot be read is refused before anything is written.

        Of safetensors one of each file is opened: the metadata do not tell how long these are.

        Raises:
            SourceError: As `locate`, and so does the other.
            UnsafeInputError: See there.
        """
        first: dict[str, tuple[StoredTensor, Chunk]] = {}
        for tensor in tensors:
            for chunk in tensor.chunks:
                first.setdefault(chunk.place.file, (tensor, chunk))
        for tensor, chunk in first.values():
            self.locate(tensor, chunk.box, chunk.place)
            if tensor.key in self._transforms or not _is_safetensors(self._files, chunk.place):
                return

    def check_transforms(self, tensor: StoredTensor) -> None:
        """Refuse a tensor that an unknown extension changed.

        Raises:
            SourceError: One did.
        """
        descriptors = self._transforms.get(tensor.key, ())
        if descriptors and descriptors != (DESCRIPTOR,):
            raise SourceError(
                "a tensor changed by extensions that are not known",
                name=tensor.key,
                file=self._files.folder,
                expected=DESCRIPTOR,
                found=", ".join(descriptors),
                fix="Save without them",
            )

    def close(self) -> None:
        """Close the files. They open again when they are read again."""
        self._files.close()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the metadata say of a chunk."""

    key: str
    dtype: torch.dtype
    box: Box
    place: Place

    def check(self, stored: Strided, files: DataFiles) -> None:
        """Refuse what is in its place if it is anything else."""
        if (stored.shape, stored.dtype) != (self.box.shape, self.dtype):
            expected = f"{list(self.box.shape)} {self.dtype}"
            raise self.refusal(files, expected, f"{list(stored.shape)} {stored.dtype}")

    def refusal(self, files: DataFiles, expected: str, found: str) -> SourceError:
        return SourceError(
            "a chunk that is not what the metadata say",
            name=self.key,
            file=files.folder / self.place.file,
            expected=expected,
            found=found,
            fix="The files are of different saves; use another step",
        )


def _find(files: DataFiles, read: Callable[[str, int], Header], wanted: _Wanted) -> Strided:
    place = wanted.place
    if not _is_safetensors(files, place):
        stored = locate(files, place, wanted.key)
    else:
        header = read(place.file, place.offset)
        entry = header.entries.get(wanted.key)
        if entry is None:
            raise wanted.refusal(files, "the tensor", "others only")
        start = (header.starts or {}).get(wanted.key, wanted.box.start)
        if start != wanted.box.start:
            raise wanted.refusal(files, f"elements from {list(wanted.box.start)}", f"those from {list(start)}")
        stored = dense(place.file, entry.place.offset, entry.dtype, entry.shape)
    wanted.check(stored, files)
    return stored


def _is_safetensors(files: DataFiles, place: Place) -> bool:
    """Tell whether a file of safetensors begins in a place: eight bytes of length, then JSON."""
    head = files.read(place.file, place.offset, min(max(files.size(place.file) - place.offset, 0), 9))
    return head[8:] == b"{"
