"""Tensors that lie on disk in blocks: what every source that reads files with a table of contents is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import lt, sub
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import SourceError
from ..memory import bytes_of
from ..spec import Box, Sharding, TensorSpec
from ..steps import Extent
from ..table import counted, summary
from .archive import ByteFiles, Place, Strided, check_extent, read_block, row_extent

if TYPE_CHECKING:  # it needs torch.distributed, which reading does not
    from ..gather import Groups

__all__ = ["Chunk", "Located", "StoredSource", "StoredTensor", "check_cover"]

_CHECK_BYTES = 32 << 20

Located = tuple[ByteFiles, Strided]
"""Where the elements of a chunk are, and the files that have them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and where it lies.

    Attributes:
        box: The block.
        place: Where it lies.
        copies: Where other ranks that also saved it put their own.
    """

    box: Box
    place: Place
    copies: tuple[Place, ...] = ()


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


class OpenFiles(Protocol):
    """Files that a source opens as it reads them."""

    def close(self) -> None:
        """Close them all."""
        ...


class StoredSource:
    """A source whose tensors lie on disk, so that every rank can read all of them. Reads nothing before it is asked.

    Args:
        folder: The folder that is read.
        files: Its files.
        tensors: The tensors by the names under which they are exported.
        locate: Finds the elements of a tensor's block in a place.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Attributes:
        skipped: Entries of the checkpoint that are not exported.
        num_found: Number of checkpoints among which this one was chosen.
    """

    copies: tuple[TensorSpec, ...] = ()
    skipped: tuple[str, ...] = ()
    num_found = 1
    is_concurrent = True

    def __init__(
        self,
        folder: Path,
        files: OpenFiles,
        tensors: Mapping[str, StoredTensor],
        locate: Callable[[StoredTensor, Box, Place], Located],
        *,
        ranks: tuple[int, ...],
        rank: int,
        device: torch.device | None,
    ) -> None:
        self.folder: Path | None = folder
        self._files = files
        self.ranks, self.rank = ranks, rank
        self.device = device or torch.device("cpu")
        self.groups: Groups = {}
        self.description = ""
        self._locate = locate
        self._put(tensors)

    def describe(self, *parts: str, prefix: str = "", remark: str = "") -> str:
        """Return one line: what was found, how much, a remark, below which prefix, and how much else there is."""
        found = [*filter(None, (*parts, summary(self.specs), remark))]
        if prefix:
            found.append(f"below {prefix.removesuffix('.')!r}")
        if self.skipped:
            found.append(f"{counted(len(self.skipped), 'other entry', 'other entries')} left out")
        return ", ".join(found)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names, and leave the rest out.

        Args:
            names: The names that are to be exported, in order, and those that they have now.
        """
        kept = set(names.values())
        self.skipped += tuple(tensor.key for name, tensor in self._tensors.items() if name not in kept)
        self._put({new: self._tensors[old] for new, old in names.items()})

    @property
    def data_files(self) -> set[Path]:
        """The files that have the tensors' bytes."""
        chunks = [chunk for tensor in self._tensors.values() for chunk in tensor.chunks]
        names = {place.file for chunk in chunks for place in (chunk.place, *chunk.copies)}
        return {self.folder / name for name in names} if self.folder is not None else set()

    def file_of(self, name: str) -> Path:
        """Return the file that has a tensor; the folder where several have parts of it, or none has an element."""
        folder = self.folder or Path()
        files = {chunk.place.file for chunk in self._tensors[name].chunks}
        return folder / files.pop() if len(files) == 1 else folder

    def stored_once(self) -> list[list[str]]:
        """Return the names under which the same bytes are found, those of each tensor together: ties of a saved module.

        Empty tensors have no bytes.
        """
        found: dict[object, list[str]] = {}
        for name, tensor in self._tensors.items():
            if tensor.chunks:
                found.setdefault((tensor.shape, tensor.dtype, tensor.chunks), []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def refresh(self) -> None:
        """Do nothing: what was saved does not change."""

    def close(self) -> None:
        """Close the files. They open again when they are read again."""
        self._files.close()

    def rows(self, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        """Read rows of a tensor into new memory on the source's device; see `Source.rows`."""
        tensor = self._tensors[spec.name]
        result = self._memory(tensor, stop - first)
        for chunk in tensor.chunks:
            begin, end = chunk.box.rows
            low, high = max(first, begin), min(stop, end)
            if low < high:
                columns = tuple(map(slice, chunk.box.start[1:], chunk.box.stop[1:]))
                target = result[(slice(low - first, high - first), *columns)] if tensor.shape else result
                self._read(tensor, chunk, (low - begin, *(0,) * len(columns))[: len(tensor.shape)], target)
        return result.to(self.device)

    def read(self, spec: TensorSpec, box: Box, target: torch.Tensor) -> None:
        """Read a block of a tensor into memory: straight from the file where both lie there in one piece.

        Args:
            spec: The tensor.
            box: The block.
            target: What to fill, of the shape of the block and the dtype of the tensor, on the CPU.

        Raises:
            SourceError: It cannot be read.
        """
        tensor = self._tensors[spec.name]
        for chunk in tensor.chunks:
            common = chunk.box.overlap(box)
            if common is not None:
                start = tuple(map(sub, common.start, chunk.box.start))
                self._read(tensor, chunk, start, target[common.slices(box.start)])

    def check(self, spec: TensorSpec, box: Box) -> None:
        """Refuse a block that cannot be read. Nothing of it is read, but for what several ranks saved copies of.

        Raises:
            SourceError: It cannot.
        """
        tensor = self._tensors[spec.name]
        for chunk in tensor.chunks:
            common = chunk.box.overlap(box)
            if common is None:
                continue
            for place in (chunk.place, *chunk.copies):
                check_extent(*self._locate(tensor, chunk.box, place))
            num_rows = max(_CHECK_BYTES // max(spec.row_bytes, 1), 1)
            for first in range(*common.rows, num_rows) if chunk.copies else ():
                rows = common.of_rows(first, first + num_rows)
                self.read(spec, rows, torch.empty(rows.shape, dtype=tensor.dtype, device="cpu"))

    def extents(self, spec: TensorSpec, first: int, stop: int) -> list[Extent] | None:
        """Return where the bytes of rows lie; see `Source.extents`."""
        tensor = self._tensors[spec.name]
        extents = []
        for chunk in tensor.chunks:
            begin, end = chunk.box.rows
            low, high = max(first, begin), min(stop, end)
            if low >= high:
                continue
            if chunk.copies or not chunk.box.has_full_rows(tensor.shape):
                return None
            extent = row_extent(*self._locate(tensor, chunk.box, chunk.place), low - begin, high - begin)
            if extent is None:
                return None
            extents.append(extent)
        return extents

    def _put(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        sharding = Sharding.replicated(self.ranks)
        self.specs = tuple(TensorSpec(name, tensor.shape, tensor.dtype, sharding) for name, tensor in tensors.items())

    def _memory(self, tensor: StoredTensor, num_rows: int) -> torch.Tensor:
        shape = (num_rows, *tensor.shape[1:]) if tensor.shape else ()
        try:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu")
        except RuntimeError as error:
            num_bytes = math.prod(shape) * tensor.dtype.itemsize
            what = f"{num_rows:,} rows that do not fit into memory"
            raise SourceError(what, name=tensor.key, file=self.folder, found=f"{num_bytes:,} bytes") from error

    def _read(self, tensor: StoredTensor, chunk: Chunk, start: Sequence[int], target: torch.Tensor) -> None:
        """Fill memory with the block of a chunk that begins at `start`, counted from where the chunk does."""
        files, stored = self._locate(tensor, chunk.box, chunk.place)
        read_block(files, stored, start, target)
        for place in chunk.copies:
            files, stored = self._locate(tensor, chunk.box, place)
            copy = torch.empty_like(target, memory_format=torch.contiguous_format)
            read_block(files, stored, start, copy)
            if not torch.equal(bytes_of(target), bytes_of(copy)):
                raise SourceError(
                    "a tensor of which ranks saved different copies",
                    name=tensor.key,
                    file=files.folder,
                    found=f"{chunk.place.file} and {place.file}",
                    fix="Save it as a DTensor if it is sharded, or leave it out with --exclude",
                )


def check_cover(tensor: StoredTensor, file: str | PathLike[str]) -> None:
    """Refuse a tensor whose chunks leave holes or overlap.

    Args:
        tensor: The tensor.
        file: What messages name.

    Raises:
        SourceError: They do.
    """
    overlap = _find_overlap(tensor.chunks)
    if overlap:
        found = " and ".join(f"{_slices(chunk.box)} in {chunk.place.file}" for chunk in overlap)
        fix = "The files are of different saves; use another step"
        raise SourceError("chunks that overlap", name=tensor.key, file=file, found=found, fix=fix)
    boxes = [chunk.box for chunk in tensor.chunks]
    if sum(math.prod(box.shape) for box in boxes) != math.prod(tensor.shape):
        first, stop = _find_hole(boxes, tensor.shape)
        found = f"no data for some of rows {first}:{stop} of {tensor.shape[0]}" if tensor.shape else "no data"
        fix = "The checkpoint is incomplete; use another step"
        raise SourceError("chunks that leave a hole", name=tensor.key, file=file, found=found, fix=fix)


def _find_overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that overlap, sweeping along the dim that has the most boundaries."""
    if len(chunks) < 2:  # noqa: PLR2004 - two
        return None
    if not chunks[0].box.start:
        return chunks[0], chunks[1]
    dim = max(range(len(chunks[0].box.start)), key=lambda dim: len({chunk.box.start[dim] for chunk in chunks}))
    reached: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.box.start[dim]):
        box = chunk.box
        reached = [other for other in reached if other.box.stop[dim] > box.start[dim]]
        for other in reached:
            if all(map(lt, box.start, other.box.stop)) and all(map(lt, other.box.start, box.stop)):
                return other, chunk
        reached.append(chunk)
    return None


def _find_hole(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, int]:
    """Return the first rows that boxes without overlaps do not cover."""
    if not shape:
        return 0, 1
    bounds = sorted({0, shape[0], *(row for box in boxes for row in box.rows)})
    for first, stop in pairwise(bounds):
        inside = [box for box in boxes if box.start[0] <= first and stop <= box.stop[0]]
        if sum(math.prod(box.shape[1:]) for box in inside) < math.prod(shape[1:]):
            return first, stop
    raise AssertionError("no hole")


def _slices(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.start, box.stop, strict=True))}]"
