"""An archive of `torch.save`: a zip of uncompressed members, a file of its own or a piece of a larger one.

`data.pkl` tells what was saved, with dtype, shape and strides of every tensor; `data/<key>` is a storage. Both are
found from the zip's directory. Of a storage nothing is read here: only where its bytes begin.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from dataclasses import dataclass

from ..errors import COPY_AGAIN, SourceError
from .archive import ByteFiles, Place, Strided
from .tensor_pickle import TensorView, read_tensor

__all__ = ["Archive", "StoredView", "locate", "locate_view"]

_MAX_INDEX_BYTES = 256 << 20
_MAX_CHUNK_INDEX_BYTES = 128 << 10  # what torch writes has less than 2 KiB, and a zip may have 64 KiB of comment
_SIGNATURE = b"PK\x03\x04"
_HEADER = struct.Struct("<4s22xHH")
_EXTRA = struct.Struct("<HH")
# What torch wrote before 1.6, and still does if asked: pickles one after another, the first of which is this number.
_OLD_FORMAT = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, ArithmeticError, EOFError, LookupError, RuntimeError, ValueError)
_WRITE_ANEW = "Write it anew: torch.save(torch.load(file, weights_only=True), file)"


@dataclass(frozen=True, slots=True)
class StoredView(Place):
    """A tensor in an archive; its place begins with the header of its storage's member and ends before the next one.

    Attributes:
        view: How it lies in the storage.
    """

    view: TensorView


class Archive:
    """The directory of an archive.

    Args:
        files: What has its bytes.
        place: Where it lies.
        name: The tensor that it holds, for messages; None where it is a file with many.

    Raises:
        SourceError: There is no archive, or it is damaged.
    """

    def __init__(self, files: ByteFiles, place: Place, name: str | None = None) -> None:
        self.files, self.place, self.name = files, place, name
        self._max_bytes = _MAX_INDEX_BYTES if name is None else _MAX_CHUNK_INDEX_BYTES
        self._bounds: list[int] = []
        self._members = self._read_directory()
        pickles = [member for member in self._members if member.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._error("a damaged archive", f"{len(pickles)} members called data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}constants.pkl" in self._members:
            raise self._error("a TorchScript program, not a state dict,", fix="Save the module's state_dict()")
        byte_order = self._read("byteorder") if f"{self._root}byteorder" in self._members else b"little"
        if byte_order != b"little":
            found = byte_order.decode("ascii", "replace")
            raise self._error("an archive in another byte order than little-endian", found)

    def pickle(self) -> bytes:
        """Return the pickle that tells what was saved."""
        return self._read("data.pkl")

    def stored(self, view: TensorView) -> StoredView:
        """Return where a tensor is, after checking in the directory that its storage is large enough.

        Raises:
            SourceError: The storage is not there, compressed, or too small.
        """
        info = self._member(f"data/{view.storage_key}")
        if view.end * view.dtype.itemsize > info.file_size:
            raise self._error("a tensor larger than its storage", f"{info.file_size:,} bytes")
        if view.storage_bytes != info.file_size:
            found = f"{view.storage_bytes:,} bytes and {info.file_size:,}"
            raise self._error("a storage that is not as large as its pickle says", found)
        header = info.header_offset
        return StoredView(self.place.file, self.place.offset + header, self._end_of(info) - header, view)

    def _end_of(self, info: zipfile.ZipInfo) -> int:
        """Return where in the archive the next member begins, or the directory."""
        position = bisect_right(self._bounds, info.header_offset)
        return self._bounds[position] if position < len(self._bounds) else self.place.length

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        head = self.files.read(self.place.file, self.place.offset, min(self.place.length, 32))
        if not head.startswith(_SIGNATURE):
            if _OLD_FORMAT in head:
                raise self._error("the file format of torch before 1.6", fix=_WRITE_ANEW)
            raise self._error("no archive of torch.save" if self.name is None else "no archive")
        try:
            with zipfile.ZipFile(_Window(self.files, self.place, self._max_bytes)) as archive:
                members, begin_of_directory = archive.infolist(), archive.start_dir
        except _ZIP_ERRORS as error:
            raise self._error("a damaged archive", error) from error
        by_name = {member.filename: member for member in members}
        if len(by_name) < len(members):
            raise self._error("a damaged archive", "a member that stands twice")
        self._bounds = sorted([*(member.header_offset for member in members), begin_of_directory])
        if self._bounds[0]:
            raise self._error("a damaged archive", f"{self._bounds[0]:,} bytes before its members")
        return by_name

    def _member(self, name: str) -> zipfile.ZipInfo:
        info = self._members.get(self._root + name)
        if info is None:
            raise self._error("a damaged archive", f"no member {self._root}{name}")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            fix = _WRITE_ANEW if self.name is None else COPY_AGAIN
            raise self._error("a compressed archive", info.filename, fix=fix)
        if not 0 <= info.header_offset <= self.place.length - _HEADER.size - info.file_size:
            raise self._error("a damaged archive", f"{info.filename} outside of it")
        return info

    def _read(self, name: str) -> bytes:
        info = self._member(name)
        if info.file_size > self._max_bytes:
            raise self._error("a damaged archive", f"{info.filename} of {info.file_size:,} bytes")
        begin = _begin(self.files, self.place.file, self.place.offset + info.header_offset, f"/{name}")
        data = self.files.read(self.place.file, begin, info.file_size)
        # torch can be told not to compute checksums, and then writes 0.
        if info.CRC not in {0, zlib.crc32(data)}:
            raise self._error("a damaged archive", f"another checksum of {info.filename}")
        return data

    def _error(self, what: str, found: object = None, *, fix: str = COPY_AGAIN) -> SourceError:
        if self.name is not None:
            what = f"{what} at byte {self.place.offset:,}"
        file = self.files.folder / self.place.file
        return SourceError(what, name=self.name, file=file, found=found, fix=fix)


def locate(files: ByteFiles, place: Place, name: str) -> Strided:
    """Find the elements of the tensor that `torch.save` wrote to a place.

    Reads the zip's directory and the small members, not the storage.

    Args:
        files: What has its bytes.
        place: Where the archive lies.
        name: The tensor, for messages.

    Raises:
        SourceError: There is no such archive, or it is damaged or compressed.
        UnsafeInputError: Its pickle names what no tensor needs.
    """
    archive = Archive(files, place, name)
    view = read_tensor(archive.pickle(), file=files.folder / place.file, name=name)
    return locate_view(files, archive.stored(view))


def locate_view(files: ByteFiles, stored: StoredView) -> Strided:
    """Find the elements of a tensor in an archive; reads the header of its storage's member.

    Raises:
        SourceError: The file cannot be read, or has no such member there.
    """
    view, itemsize = stored.view, stored.view.dtype.itemsize
    begin = _begin(files, stored.file, stored.offset, f"/data/{view.storage_key}")
    if begin + view.end * itemsize > stored.offset + stored.length:
        raise _no_member(files, stored.file, stored.offset)
    return Strided(stored.file, begin + view.offset * itemsize, view.dtype, view.shape, view.strides)


def _begin(files: ByteFiles, file: str, header: int, suffix: str) -> int:
    """Return the byte in a file at which the bytes of a member begin whose header is at a byte.

    The header is checked as far as it goes: no checksum of a storage is, and what is wrong here would read as values.
    """
    signature, name_bytes, extra_bytes = _HEADER.unpack(files.read(file, header, _HEADER.size))
    if signature != _SIGNATURE:
        raise _no_member(files, file, header)
    begin = header + _HEADER.size
    rest = files.read(file, begin, name_bytes + extra_bytes)
    if not rest[:name_bytes].endswith(suffix.encode()) or not _are_records(rest[name_bytes:]):
        raise _no_member(files, file, header)
    return begin + int(name_bytes) + int(extra_bytes)


def _are_records(extra: bytes) -> bool:
    """Tell whether records fill the part of a header in which torch has its padding."""
    position = 0
    while position + _EXTRA.size <= len(extra):
        position += _EXTRA.size + _EXTRA.unpack_from(extra, position)[1]
    return position == len(extra)


def _no_member(files: ByteFiles, file: str, header: int) -> SourceError:
    found = f"no member at byte {header:,}"
    return SourceError("a damaged archive", file=files.folder / file, found=found, fix=COPY_AGAIN)


class _Window(io.RawIOBase):
    """A range of bytes of a data file as a file of its own, for `zipfile`."""

    def __init__(self, files: ByteFiles, place: Place, max_bytes: int) -> None:
        super().__init__()
        self._files, self._place, self._max_bytes = files, place, max_bytes
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
        if count > self._max_bytes:
            raise ValueError(f"a directory of {count:,} bytes")
        data = self._files.read(self._place.file, self._place.offset + self._position, count)
        self._position += count
        return data
