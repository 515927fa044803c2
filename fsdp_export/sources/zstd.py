"""Chunks that torch's ZStandard extension compressed: unpacked one at a time, in memory."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import IO, Any, cast

from ..errors import COPY_AGAIN, SourceError
from .archive import ByteFiles, Place

__all__ = ["DESCRIPTOR", "Unpacked", "unpack"]

DESCRIPTOR = "stream.zstd/1"
"""How a checkpoint names this extension."""

_PIECE_BYTES = 1 << 20
_PACKAGES = ("zstandard", "pyzstd")


class Unpacked:
    """A file in memory, under the name of the one that it was compressed in.

    Args:
        folder: The folder of that file.
        data: What was in it.
    """

    def __init__(self, folder: Path, data: bytearray) -> None:
        self.folder, self._data = folder, data

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill memory with the bytes that begin at an offset.

        Raises:
            SourceError: There are not as many.
        """
        target[:] = self._part(file, offset, len(target))

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Return bytes; see `read_into`."""
        return bytes(self._part(file, offset, count))

    def _part(self, file: str, offset: int, count: int) -> memoryview:
        if offset + count > len(self._data):
            expected, found = f"{offset + count:,} bytes", f"{len(self._data):,}"
            raise SourceError("a truncated chunk", file=self.folder / file, expected=expected, found=found)
        return memoryview(self._data)[offset : offset + count]


def unpack(files: ByteFiles, place: Place, max_bytes: int, name: str) -> tuple[Unpacked, Place]:
    """Decompress what lies in a place.

    Args:
        files: What has its bytes.
        place: Where it lies.
        max_bytes: Bytes that it may have when it is unpacked.
        name: The tensor, for messages.

    Returns:
        The bytes, and where in them the content lies.

    Raises:
        SourceError: There is no package that can, or what is there is damaged or larger.
    """
    module = _find_module()
    file = files.folder / place.file
    if module is None:
        raise SourceError(
            "a tensor compressed with zstd, for which neither of its packages is installed,",
            name=name,
            file=file,
            fix="Install zstandard",
        )
    data = bytearray()
    try:
        stream = _open(module, _Compressed(files, place))
        while len(data) <= max_bytes and (piece := stream.read(_PIECE_BYTES)):
            data += piece
    except (EOFError, OSError, ValueError, module.ZstdError) as error:
        what = f"a damaged zstd stream at byte {place.offset:,}"
        raise SourceError(what, name=name, file=file, found=error, fix=COPY_AGAIN) from error
    if len(data) > max_bytes:
        raise SourceError(
            f"a zstd stream larger than its tensor at byte {place.offset:,}",
            name=name,
            file=file,
            expected=f"at most {max_bytes:,} bytes",
            found="more",
        )
    return Unpacked(files.folder, data), Place(place.file, 0, len(data))


class _Compressed(io.RawIOBase):
    """A range of bytes of a file as a stream, for libraries that read streams."""

    def __init__(self, files: ByteFiles, place: Place) -> None:
        super().__init__()
        self._files, self._place = files, place
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer)[: self._place.length - self._position]
        self._files.read_into(self._place.file, self._place.offset + self._position, target)
        self._position += len(target)
        return len(target)


def _find_module() -> Any:
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _open(module: Any, stream: io.RawIOBase) -> IO[bytes]:
    """Open a stream of one or more frames; pyzstd begins a new one at every flush."""
    if module.__name__ == "zstandard":
        return cast("IO[bytes]", module.ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    return cast("IO[bytes]", module.ZstdFile(stream))
