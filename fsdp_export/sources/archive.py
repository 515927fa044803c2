"""The files of a checkpoint: their bytes, and rows of the tensors that lie in them, read straight into the result."""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import mul
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch

from ..errors import truncated_file, unreadable_file
from ..steps import Extent

__all__ = [
    "ByteFiles",
    "DataFiles",
    "Place",
    "Strided",
    "check_extent",
    "is_inside",
    "is_possible",
    "read_block",
    "read_rows",
    "row_extent",
]

_MAX_OPEN = 64
_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 58
# Shorter runs of bytes cost more calls than they save: the kernel reads whole pages.
_MIN_RUN_BYTES = 4096
_SPAN_BYTES = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


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


class ByteFiles(Protocol):
    """Files whose bytes can be read at any offset.

    Attributes:
        folder: Where they are, for messages.
    """

    folder: Path

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file that begin at an offset."""
        ...

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Return bytes of a file."""
        ...


def is_inside(file: str) -> bool:
    """Tell whether a name that a checkpoint gives to a file is that of one below its folder."""
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and file.isprintable()


def is_possible(shape: Sequence[int]) -> bool:
    """Tell whether a tensor can have a shape, so that its numbers of elements and bytes can be told."""
    return len(shape) <= _MAX_DIMS and math.prod(max(size, 1) for size in shape) < _MAX_ELEMENTS


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
            with self.opened(file) as descriptor:
                while position < len(target):
                    count = os.preadv(descriptor, [target[position:]], offset + position)
                    if not count:
                        break
                    position += count
        except OSError as error:
            raise unreadable_file(self.folder / file, error) from error
        if position < len(target):
            found = min(offset + position, self.size(file))  # it may end far before what is read
            raise truncated_file(self.folder / file, offset + len(target), found)

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Return bytes of a file; see `read_into`."""
        data = bytearray(count)
        self.read_into(file, offset, memoryview(data))
        return bytes(data)

    def size(self, file: str) -> int:
        """Return the number of bytes of a file.

        Raises:
            SourceError: It cannot be opened.
        """
        try:
            with self.opened(file) as descriptor:
                return os.fstat(descriptor).st_size
        except OSError as error:
            raise unreadable_file(self.folder / file, error) from error

    def close(self) -> None:
        """Close all files. They open again when they are read again."""
        with self._lock:
            _close_all(self._descriptors)

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        """Give a descriptor of a file, which stays open for the time of the context.

        Raises:
            OSError: It cannot be opened.
        """
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
            if descriptor is None:
                # A pipe in the place of a file would wait for its writer.
                descriptor = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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


def read_rows(files: ByteFiles, stored: Strided, first: int, target: torch.Tensor) -> None:
    """Read rows of a stored tensor, and nothing between them.

    Args:
        files: What has its bytes.
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
    order, outer, run = _runs(shape, strides)
    # Values of some dtypes cannot be copied, but those of integers as wide always can.
    target = target.view(_INTEGERS[itemsize])
    is_direct = target.is_contiguous() and order == sorted(order)
    ordered = target if is_direct else target.new_empty([shape[dim] for dim in order])
    memory = ordered.reshape(-1).view(torch.uint8).numpy().data
    run_bytes = run * itemsize
    for number, index in enumerate(itertools.product(*(range(shape[dim]) for dim in outer))):
        offset = sum(position * strides[dim] for position, dim in zip(index, outer, strict=True))
        files.read_into(stored.file, begin + offset * itemsize, memory[number * run_bytes : (number + 1) * run_bytes])
    if not is_direct:
        target.copy_(ordered.permute([order.index(dim) for dim in range(len(shape))]))


def read_block(files: ByteFiles, stored: Strided, start: Sequence[int], target: torch.Tensor) -> None:
    """Read a block of a stored tensor.

    Where it has only some columns, in runs of bytes shorter than a page, what lies between them is read as well, a few
    rows at a time.

    Args:
        files: What has its bytes.
        stored: The tensor.
        start: Where the block begins, in every dim.
        target: What to fill, of the shape of the block; as for `read_rows`.

    Raises:
        SourceError: The file cannot be read.
    """
    itemsize, shape = stored.dtype.itemsize, tuple(target.shape)
    offset = stored.offset + sum(map(mul, start, stored.strides)) * itemsize
    block = Strided(stored.file, offset, stored.dtype, shape, stored.strides)
    _, outer, run = _runs(shape, stored.strides)
    if shape[1:] != stored.shape[1:] and outer and run * itemsize < _MIN_RUN_BYTES and target.numel():
        _read_spans(files, block, target.view(_INTEGERS[itemsize]), max(outer, key=lambda dim: stored.strides[dim]))
    else:
        read_rows(files, block, 0, target)


def _runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Return the dims by their strides, those that are walked through, and how many elements lie in a row then."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    outer, run = list(order), 1
    while outer and (shape[outer[-1]] == 1 or strides[outer[-1]] == run):
        run *= shape[outer.pop()]
    return order, outer, run


def _read_spans(files: ByteFiles, block: Strided, target: torch.Tensor, dim: int) -> None:
    """Read all that lies from the first element of a block to its last, a few indices of a dim at a time."""
    itemsize, stride = target.itemsize, block.strides[dim]
    inner = 1 + sum((block.shape[other] - 1) * block.strides[other] for other in range(target.dim()) if other != dim)
    count = max(_SPAN_BYTES // max(stride * itemsize, 1), 1)
    for first in range(0, block.shape[dim], count):
        part = target.narrow(dim, first, min(count, block.shape[dim] - first))
        span = target.new_empty((part.shape[dim] - 1) * stride + inner)
        files.read_into(block.file, block.offset + first * stride * itemsize, span.view(torch.uint8).numpy().data)
        part.copy_(span.as_strided(part.shape, block.strides))


def check_extent(files: ByteFiles, stored: Strided) -> None:
    """Refuse a stored tensor that reaches beyond the end of its file. Of what is unpacked nothing is known before.

    Raises:
        SourceError: It does, or the file cannot be opened.
    """
    if isinstance(files, DataFiles) and 0 not in stored.shape:
        last = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
        end, num_bytes = stored.offset + (last + 1) * stored.dtype.itemsize, files.size(stored.file)
        if num_bytes < end:
            raise truncated_file(files.folder / stored.file, end, num_bytes)


def row_extent(files: ByteFiles, stored: Strided, first: int, stop: int) -> Extent | None:
    """Return where the bytes of rows of a stored tensor lie in its file; None where they are not one run of bytes.

    Args:
        files: What has its bytes.
        stored: The tensor.
        first: The first row; 0 for a 0-dim tensor.
        stop: The one after the last.
    """
    if not isinstance(files, DataFiles):
        return None
    run = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides), strict=True):
        if size > 1 and stride != run:
            return None
        run *= size
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    offset, num_bytes = stored.offset + first * row_bytes, (stop - first) * row_bytes
    return Extent(files.folder / stored.file, offset, num_bytes, partial(files.opened, stored.file))
