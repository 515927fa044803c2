"""DCP folders: saved by torch, or put together chunk by chunk."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Block = tuple[slice, ...]


def save(folder: Path, state_dict: Mapping[str, Any], **options: Any) -> Path:
    """Save with torch, in this process or, when a process group is there, with all of its ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state_dict), checkpoint_id=folder, **options)
    return folder


def put_together(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    blocks_of: Callable[[torch.Tensor], Sequence[Block]] = lambda tensor: [tuple(map(slice, tensor.shape))],
    *,
    num_files: int = 1,
    stored_as: Callable[[torch.Tensor], object] = torch.Tensor.contiguous,
    only_rank: int | None = None,
) -> Path:
    """Write tensors in chosen blocks, turn by turn into several data files.

    Args:
        folder: Where to; made if it is not there.
        tensors: The full tensors.
        blocks_of: Which blocks a tensor is cut into.
        num_files: As if so many ranks had saved.
        stored_as: Makes of a block what is saved, a tensor that may be any view.
        only_rank: As if only this rank's blocks were given, and ranks had kept their metadata to themselves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [bytearray() for _ in range(num_files)]
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        chunks = []
        for block in blocks_of(tensor):
            stream = io.BytesIO()
            torch.save(stored_as(tensor[block]), stream)
            start = torch.Size(part.indices(size)[0] for part, size in zip(block, tensor.shape, strict=True))
            chunks.append(ChunkStorageMetadata(start, tensor[block].shape))
            number = len(places) % num_files
            places[MetadataIndex(name, start)] = _StorageInfo(
                f"__{only_rank or number}_0.distcp", len(files[number]), len(stream.getvalue())
            )
            files[number] += stream.getvalue()
        entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    paths = {name: (name,) for name in tensors}
    metadata_file = ".metadata" if only_rank is None else f"__{only_rank}.metadata"
    (folder / metadata_file).write_bytes(pickle.dumps(Metadata(entries, paths, places, StorageMeta(folder))))
    for number, data in enumerate(files):
        (folder / f"__{only_rank or number}_0.distcp").write_bytes(data)
    return folder


def edit_metadata(folder: Path, edit: Callable[[Any], object], file_name: str = ".metadata") -> None:
    """Change what the metadata of a folder say."""
    file = folder / file_name
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))
