"""A DCP checkpoint: a folder with `.metadata` and `*.distcp` files, read lazily and without torch.distributed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import ExportError, NotFoundError, SourceError, listing
from ..spec import Box, Sharding, TensorSpec
from ..table import summary
from .archive import DataFiles, Strided, locate, read_rows
from .dcp_metadata import METADATA, Chunk, Metadata, StoredTensor, read_metadata
from .dcp_model import find_model

if TYPE_CHECKING:  # it needs torch.distributed, which reading does not
    from ..gather import Groups

__all__ = ["DcpSource", "is_dcp_folder", "open_metadata"]

_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_MAX_LOCATED = 16_384
_NAME_ANOTHER = "Name the folder that has them"
_USE_ANOTHER = "The checkpoint is incomplete; use another step"


class DcpSource:
    """The model of a DCP checkpoint. Every rank can read all of it; nothing is read before `rows` asks for it.

    Args:
        folder: The folder with `.metadata`.
        prefix: What the model's keys begin with; None to find out.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Attributes:
        skipped: Keys of the checkpoint that are not exported: optimizer, counters, what is no tensor.

    Raises:
        NotFoundError: There is no tensor of a model, or none below the prefix.
        UsageError: Several prefixes could be meant.
        SourceError: Files are missing, truncated or damaged, or the chunks of a tensor leave holes or overlap.
        UnsafeInputError: A pickle names what no checkpoint needs.
    """

    copies: tuple[TensorSpec, ...] = ()

    def __init__(
        self,
        folder: Path,
        *,
        prefix: str | None = None,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.folder: Path | None = folder
        self.ranks, self.rank = ranks, rank
        self.device = device or torch.device("cpu")
        self.groups: Groups = {}
        metadata = open_metadata(folder)
        model = find_model(metadata, prefix)
        self._files = DataFiles(folder)
        self._locate = lru_cache(_MAX_LOCATED)(partial(_locate, self._files))
        self._tensors = {name: metadata.tensor(key) for name, key in model.keys.items()}
        for tensor in self._tensors.values():
            _check_cover(tensor, metadata.file)
        self._probe()
        sharding = Sharding.replicated(ranks)
        self.specs = tuple(
            TensorSpec(name, tensor.shape, tensor.dtype, sharding) for name, tensor in self._tensors.items()
        )
        exported = set(model.keys.values())
        self.skipped = tuple(key for key in (*metadata.tensors, *metadata.others) if key not in exported)
        self.description = self._describe(len(metadata.file_bytes), model.prefix)

    def refresh(self) -> None:
        """Do nothing: what was saved does not change."""

    def rows(self, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        """Read rows of a tensor into new memory on the source's device; see `Source.rows`."""
        tensor = self._tensors[spec.name]
        result = torch.empty((stop - first, *tensor.shape[1:]) if tensor.shape else (), dtype=tensor.dtype)
        for chunk in tensor.chunks:
            begin, end = chunk.box.rows
            low, high = max(first, begin), min(stop, end)
            if low < high:
                stored = self._locate(chunk, tensor.key, tensor.dtype)
                columns = tuple(map(slice, chunk.box.start[1:], chunk.box.stop[1:]))
                target = result[(slice(low - first, high - first), *columns)] if tensor.shape else result
                read_rows(self._files, stored, low - begin, target)
        return result.to(self.device)

    def close(self) -> None:
        """Close the data files. They open again when they are read again."""
        self._files.close()

    def _probe(self) -> None:
        """Open one chunk, so that a format that is not understood is refused before anything is written."""
        tensor = next((tensor for tensor in self._tensors.values() if tensor.chunks), None)
        if tensor is not None:
            self._locate(tensor.chunks[0], tensor.key, tensor.dtype)

    def _describe(self, num_files: int, prefix: str) -> str:
        parts = [f"DCP checkpoint, {num_files:,} data {'file' if num_files == 1 else 'files'}", summary(self.specs)]
        if prefix:
            parts.append(f"below {prefix.removesuffix('.')!r}")
        if self.skipped:
            parts.append(f"{len(self.skipped):,} other {'entry' if len(self.skipped) == 1 else 'entries'} left out")
        return ", ".join(parts)


def is_dcp_folder(file_names: Iterable[str]) -> bool:
    """Tell from the names of a folder's files whether it is a DCP checkpoint, or a part of one."""
    return any(
        name == METADATA or name.endswith(".distcp") or _RANK_METADATA.fullmatch(name) is not None
        for name in file_names
    )


def open_metadata(folder: Path) -> Metadata:
    """Read the metadata of a DCP checkpoint and check that all its data files are there.

    Raises:
        NotFoundError: The folder is no DCP checkpoint.
        SourceError: Files are missing, truncated or damaged.
        UnsafeInputError: The metadata name what no checkpoint needs.
    """
    if not (folder / METADATA).is_file():
        raise _no_metadata(folder)
    metadata = read_metadata(folder)
    sizes = {file: _size(folder / file) for file in metadata.file_bytes}
    missing = [file for file, size in sizes.items() if size is None]
    if missing:
        all_ranks = {_rank_of(file) for file in sizes}
        ranks_here = {_rank_of(file) for file in sizes if file not in missing}
        raise SourceError(
            f"missing {listing(map(_with_rank, missing))}",
            file=folder,
            expected=f"data files of {len(all_ranks):,} ranks",
            found=f"those of {len(ranks_here):,}",
            fix="Node-local disks are the usual cause: copy the others here",
        )
    truncated = [
        f"{_with_rank(file)} with {sizes[file]:,} of {num_bytes:,} bytes"
        for file, num_bytes in metadata.file_bytes.items()
        if (sizes[file] or 0) < num_bytes
    ]
    if truncated:
        fix = "Copy them here again, or use another step"
        raise SourceError("truncated data files", file=folder, found=listing(truncated), fix=fix)
    return metadata


def _no_metadata(folder: Path) -> ExportError:
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as error:
        return NotFoundError("no DCP checkpoint", file=folder, found=error.strerror or error, fix=_NAME_ANOTHER)
    per_rank = [name for name in names if _RANK_METADATA.fullmatch(name)]
    if per_rank:
        fix = "Save with use_collectives=True, the default"
        return SourceError(
            "one metadata file per rank, not supported yet,", file=folder, found=listing(per_rank), fix=fix
        )
    data_files = [name for name in names if name.endswith(".distcp")]
    if not data_files:
        expected = f"{METADATA} and *.distcp files"
        found = listing(names) or "nothing"
        return NotFoundError("no DCP checkpoint", file=folder, expected=expected, found=found, fix=_NAME_ANOTHER)
    ranks = sorted({rank for name in data_files if (rank := _rank_of(name)) is not None})
    found = f"data files of {_ranges(ranks)}" if ranks else f"{len(data_files):,} data files"
    fix = "Rank 0 writes it when all others are done: copy it here from its node"
    if f"{METADATA}.tmp" in names:
        found += f" and {METADATA}.tmp, left by a save that did not finish"
        fix = f"Rename it to {METADATA} to try it, or use another step"
    return SourceError(f"no {METADATA}", file=folder, found=found, fix=fix)


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _rank_of(file: str) -> int | None:
    match = _DATA_FILE.fullmatch(file)
    return int(match[1]) if match else None


def _with_rank(file: str) -> str:
    rank = _rank_of(file)
    return file if rank is None else f"{file} (rank {rank})"


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, with runs as ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def _locate(files: DataFiles, chunk: Chunk, key: str, dtype: torch.dtype) -> Strided:
    """Find the elements of a chunk and check that they are what the metadata say."""
    stored = locate(files, chunk.place, key)
    if (stored.shape, stored.dtype) != (chunk.box.shape, dtype):
        raise SourceError(
            "a chunk that is not what the metadata say",
            name=key,
            file=files.folder / chunk.place.file,
            expected=f"{list(chunk.box.shape)} {dtype}",
            found=f"{list(stored.shape)} {stored.dtype}",
            fix="The files are of different saves; use another step",
        )
    return stored


def _check_cover(tensor: StoredTensor, file: Path) -> None:
    """Refuse a tensor whose chunks leave holes or overlap."""
    boxes = [chunk.box for chunk in tensor.chunks]
    overlap = _find_overlap(boxes)
    if overlap:
        found = " and ".join(map(_slices, overlap))
        raise SourceError("chunks that overlap", name=tensor.key, file=file, found=found, fix=_USE_ANOTHER)
    if sum(math.prod(box.shape) for box in boxes) != math.prod(tensor.shape):
        first, stop = _find_hole(boxes, tensor.shape)
        found = f"no data for some of rows {first}:{stop} of {tensor.shape[0]}" if tensor.shape else "no data"
        raise SourceError("chunks that leave a hole", name=tensor.key, file=file, found=found, fix=_USE_ANOTHER)


def _find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, sweeping along the dim that has the most boundaries."""
    if len(boxes) < 2:  # noqa: PLR2004 - two
        return None
    dim = max(range(len(boxes[0].start)), key=lambda dim: len({box.start[dim] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        open_boxes = [other for other in open_boxes if other.stop[dim] > box.start[dim]]
        for other in open_boxes:
            if all(map(lt, box.start, other.stop)) and all(map(lt, other.start, box.stop)):
                return other, box
        open_boxes.append(box)
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
