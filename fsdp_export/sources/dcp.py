"""A DCP checkpoint: a folder with metadata and `*.distcp` files, read lazily and without torch.distributed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from ..errors import COPY_AGAIN, ExportError, NotFoundError, SourceError, listing
from ..paths import is_file
from ..table import counted, rank_ranges
from .dcp_chunks import ChunkFiles
from .dcp_metadata import METADATA, Metadata, rank_of_metadata, read_metadata
from .dcp_model import find_model
from .stored import StoredSource, check_cover

__all__ = ["DcpSource", "open_metadata", "recognizes"]

_DATA_FILE = re.compile(r"__(\d{1,5})_\d+\.distcp")
# What Lightning saves beside the tensors: a pickle of anything, which is not opened.
_LIGHTNING = "meta.pt"
_NAME_ANOTHER = "Name the folder that has them"
_COPY_OTHERS = "Node-local disks are the usual cause: copy the others here"


class DcpSource(StoredSource):
    """The model of a DCP checkpoint. Every rank can read all of it; nothing is read before `rows` asks for it.

    Args:
        folder: The folder with `.metadata`, or with `__0.metadata` and so on.
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

    def __init__(
        self,
        folder: Path,
        *,
        prefix: str | None = None,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        metadata = open_metadata(folder)
        model = find_model(metadata, prefix, of_lightning=is_file(folder / _LIGHTNING))
        _check_names(metadata, model.prefix)
        tensors = {name: metadata.tensor(key) for name, key in model.keys.items()}
        files = ChunkFiles(folder, metadata.transforms)
        for tensor in tensors.values():
            check_cover(tensor, metadata.subject)
            files.check_transforms(tensor)
        super().__init__(folder, files, tensors, files.locate, ranks=ranks, rank=rank, device=device)
        files.probe(tensors.values())
        # A chunk that extensions changed is unpacked whole: by several threads, several of them at once.
        self.is_concurrent = not metadata.transforms
        exported = set(model.keys.values())
        self.skipped = tuple(key for key in (*metadata.tensors, *metadata.others) if key not in exported)
        self.description = self.describe(*_kind(metadata), prefix=model.prefix)


def _check_names(metadata: Metadata, prefix: str) -> None:
    """Refuse metadata that list a tensor of the model and say nothing of it, as where one of its names is damaged."""
    described = {*metadata.tensors, *metadata.others}
    lost = [key for key in metadata.paths if key.startswith(prefix) and key not in described]
    if lost:
        raise SourceError(
            "tensors without an entry", file=metadata.subject, found=listing(map(repr, lost)), fix=COPY_AGAIN
        )


def _kind(metadata: Metadata) -> tuple[str, str]:
    ranks = {_rank_of(file) for file in metadata.file_bytes}
    count = "" if None in ranks else f" of {counted(len(ranks), 'rank')}"
    return f"DCP checkpoint{count}", counted(len(metadata.file_bytes), "data file")


def recognizes(file_names: Collection[str]) -> bool:
    """Tell from the names of a folder's files whether it is a DCP checkpoint, or a part of one."""
    return any(
        name == METADATA or name.endswith(".distcp") or rank_of_metadata(name) is not None for name in file_names
    )


def open_metadata(folder: Path) -> Metadata:
    """Read the metadata of a DCP checkpoint and check that all its data files are there.

    Raises:
        NotFoundError: The folder is no DCP checkpoint.
        SourceError: Files are missing, truncated or damaged.
        UnsafeInputError: The metadata name what no checkpoint needs.
    """
    metadata = read_metadata(folder, _metadata_files(folder))
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
            fix=_COPY_OTHERS,
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


def _metadata_files(folder: Path) -> list[str]:
    """Return the names of the metadata files: torch, too, prefers the one of all ranks."""
    if is_file(folder / METADATA):
        return [METADATA]
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as error:
        raise NotFoundError(
            "no DCP checkpoint", file=folder, found=error.strerror or error, fix=_NAME_ANOTHER
        ) from error
    if METADATA in names:  # to be refused for what it is
        return [METADATA]
    by_rank = {rank: name for name in names if (rank := rank_of_metadata(name)) is not None}
    if not by_rank:
        raise _no_metadata(folder, names)
    ranks = {rank for name in names if (rank := _rank_of(name)) is not None} | set(by_rank)
    missing = sorted(set(range(max(ranks) + 1)) - set(by_rank))
    if missing:
        raise SourceError(
            f"missing {listing(f'__{rank}{METADATA}' for rank in missing)}",
            file=folder,
            expected=f"metadata of {max(ranks) + 1:,} ranks",
            found=f"those of {rank_ranges(sorted(by_rank))}",
            fix=_COPY_OTHERS,
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _no_metadata(folder: Path, names: Sequence[str]) -> ExportError:
    data_files = [name for name in names if name.endswith(".distcp")]
    if not data_files:
        expected = f"{METADATA} and *.distcp files"
        found = listing(names) or "nothing"
        return NotFoundError("no DCP checkpoint", file=folder, expected=expected, found=found, fix=_NAME_ANOTHER)
    ranks = sorted({rank for name in data_files if (rank := _rank_of(name)) is not None})
    found = f"data files of {rank_ranges(ranks)}" if ranks else f"{len(data_files):,} data files"
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
