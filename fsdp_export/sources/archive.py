"""A tensor inside a data file: one archive of `torch.save`, whose bytes are read without loading the rest of it.

The archive is a zip of uncompressed members. `data.pkl` tells dtype, shape and strides, `data/0` is the storage. Both
are found from the zip's directory; of the storage only the wanted rows are read, straight into the result.
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import threading
import weakref
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import SourceError
from .tensor_pickle import read_tensor

__all__ = ["DataFiles", "Place", "Strided", "locate", "read_rows"]

_MAX_OPEN = 64
_MAX_DIRECTORY_BYTES = 1 << 20
_LOCAL_SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, ArithmeticError, EOFError, LookupError, RuntimeError, ValueError)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_COPY_AGAIN = "Copy the file here again, or use another step"


@dataclass(frozen=True, slots=True)
class Strided:
    """Where the elements of a tensor are.

    Attributes:
        file: The data file, relative to its folder.
        offset: Byte in the file at which the first element begins.
        dtype: The dtype.
        shape: The shape.
        strides: Elements from one index to the next, in every dim.
    """

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: a data file, relative to its folder, and a range of bytes in it."""

    file: str
    offset: int
    length: int


class DataFiles:
    """The data files of a folder, opened when they are read first; the least recently used ones are closed again.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        self._readers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._descriptors)

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file that begin at an offset.

        Raises:
            SourceError: The file cannot be read, or is shorter.
        """
        position = 0
        try:
            with self._opened(file) as descriptor:
                while position < len(target):
                    count = os.preadv(descriptor, [target[position:]], offset + position)
                    if not count:
                        break
                    position += count
        except OSError as error:
            found = error.strerror or error
            raise SourceError("a data file that cannot be read", file=self.folder / file, found=found) from error
        if position < len(target):
            raise SourceError(
                "a truncated data file",
                file=self.folder / file,
                expected=f"{offset + len(target):,} bytes",
                found=f"{offset + position:,}",
                fix=_COPY_AGAIN,
            )

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Return bytes of a file; see `read_into`."""
        data = bytearray(count)
        self.read_into(file, offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close all files. They open again when they are read again."""
        with self._lock:
            _close_all(self._descriptors)

    @contextmanager
    def _opened(self, file: str) -> Iterator[int]:
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
            if descriptor is None:
                descriptor = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors[file] = descriptor
            self._readers[file] += 1
            if len(self._descriptors) > _MAX_OPEN:
                idle = next((name for name in self._descriptors if not self._readers[name]), None)
                if idle is not None:
                    os.close(self._descriptors.pop(idle))
        try:
            yield descriptor
        finally:
            with self._lock:
                self._readers[file] -= 1


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def locate(files: DataFiles, place: Place, name: str) -> Strided:
    """Find the elements of the tensor that `torch.save` wrote to a place.

    Reads the zip's directory and the small members, not the storage.

    Args:
        files: The folder's data files.
        place: Where the archive lies.
        name: The tensor, for messages.

    Raises:
        SourceError: There is no such archive, or it is damaged or compressed.
        UnsafeInputError: Its pickle names what no tensor needs.
    """
    return _Archive(files, place, name).tensor()


class _Archive:
    def __init__(self, files: DataFiles, place: Place, name: str) -> None:
        self.files, self.place, self.name = files, place, name
        self.members = self._read_directory()

    def tensor(self) -> Strided:
        """Return where the elements are, after checking that they lie within the storage."""
        pickles = [member for member in self.members if member.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._error("a damaged archive", f"{len(pickles)} members called data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        byte_order = self._small_member(f"{root}byteorder") if f"{root}byteorder" in self.members else b"little"
        if byte_order != b"little":
            found = byte_order.decode("ascii", "replace")
            raise self._error("an archive in another byte order than little-endian", found)
        file = self.files.folder / self.place.file
        tensor = read_tensor(self._small_member(pickles[0]), file=file, name=self.name)
        offset, num_bytes = self._range(f"{root}data/{tensor.storage_key}")
        itemsize = tensor.dtype.itemsize
        if tensor.end * itemsize > num_bytes:
            raise self._error("a tensor larger than its storage", f"{num_bytes:,} bytes")
        return Strided(self.place.file, offset + tensor.offset * itemsize, tensor.dtype, tensor.shape, tensor.strides)

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        head = self.files.read(self.place.file, self.place.offset, min(self.place.length, 9))
        if head[8:] == b"{":  # behind eight bytes of length: the header of safetensors
            fix = "Save with SerializationFormat.TORCH_SAVE, the default"
            raise self._error("safetensors inside a DCP checkpoint, not supported yet,", fix=fix)
        if head[:4] != _LOCAL_SIGNATURE:
            raise self._error("no archive")
        try:
            with zipfile.ZipFile(_Window(self.files, self.place)) as archive:
                return {member.filename: member for member in archive.infolist()}
        except _ZIP_ERRORS as error:
            raise self._error("a damaged archive", error) from error

    def _range(self, member_name: str) -> tuple[int, int]:
        """Return where the bytes of a member begin in the file, and how many there are."""
        member = self.members.get(member_name)
        if member is None:
            raise self._error("a damaged archive", f"no member {member_name}")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise self._error("a compressed archive", member_name)
        if not 0 <= member.header_offset <= self.place.length - _LOCAL_HEADER.size:
            raise self._error("a damaged archive", f"{member_name} outside of it")
        header = self.files.read(self.place.file, self.place.offset + member.header_offset, _LOCAL_HEADER.size)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if signature != _LOCAL_SIGNATURE or begin + member.file_size > self.place.length:
            raise self._error("a damaged archive", f"{member_name} outside of it")
        return self.place.offset + begin, member.file_size

    def _small_member(self, member_name: str) -> bytes:
        offset, num_bytes = self._range(member_name)
        if num_bytes > _MAX_DIRECTORY_BYTES:
            raise self._error("a damaged archive", f"{member_name} of {num_bytes:,} bytes")
        return self.files.read(self.place.file, offset, num_bytes)

    def _error(self, what: str, found: object = None, *, fix: str = _COPY_AGAIN) -> SourceError:
        file = self.files.folder / self.place.file
        return SourceError(f"{what} at byte {self.place.offset:,}", name=self.name, file=file, found=found, fix=fix)


class _Window(io.RawIOBase):
    """A range of bytes of a data file as a file of its own, for `zipfile`."""

    def __init__(self, files: DataFiles, place: Place) -> None:
        super().__init__()
        self._files, self._place = files, place
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._place.length}[whence]
        if origin + offset < 0:
            raise ValueError("a position before the archive")
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        rest = max(self._place.length - self._position, 0)
        count = rest if size < 0 else min(size, rest)
        if count > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {count:,} bytes")
        data = self._files.read(self._place.file, self._place.offset + self._position, count)
        self._position += count
        return data


def read_rows(files: DataFiles, stored: Strided, first: int, target: torch.Tensor) -> None:
    """Read rows of a stored tensor, and nothing between them.

    Args:
        files: The folder's data files.
        stored: The tensor.
        first: The first row; 0 for a 0-dim tensor.
        target: What to fill, of the shape of the wanted rows and the tensor's dtype, on the CPU. Where it and the
            stored rows are contiguous the bytes go straight into its memory.

    Raises:
        SourceError: The file cannot be read.
    """
    if not target.numel():
        return
    itemsize, shape, strides = stored.dtype.itemsize, tuple(target.shape), stored.strides
    begin = stored.offset + (first * strides[0] * itemsize if shape else 0)
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    outer, run = list(order), 1
    while outer and (shape[outer[-1]] == 1 or strides[outer[-1]] == run):
        run *= shape[outer.pop()]
    # Values of some dtypes cannot be copied, but those of integers as wide always can.
    target = target.view(_INTEGERS[itemsize])
    is_direct = target.is_contiguous() and order == sorted(order)
    ordered = target if is_direct else torch.empty([shape[dim] for dim in order], dtype=target.dtype)
    memory = ordered.reshape(-1).view(torch.uint8).numpy().data
    run_bytes = run * itemsize
    for number, index in enumerate(itertools.product(*(range(shape[dim]) for dim in outer))):
        offset = sum(position * strides[dim] for position, dim in zip(index, outer, strict=True))
        files.read_into(stored.file, begin + offset * itemsize, memory[number * run_bytes : (number + 1) * run_bytes])
    if not is_direct:
        target.copy_(ordered.permute([order.index(dim) for dim in range(len(shape))]))
