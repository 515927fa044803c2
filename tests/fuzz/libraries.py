"""What the libraries that write checkpoints read from them: the judges of inputs that have become other checkpoints.

Only for inputs that our reader has taken, which therefore name no code.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fuzz.seeds import Seed
from rank_folders import as_rank
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

__all__ = ["read"]

Tensors = dict[str, torch.Tensor]


def read(seed: Seed, folder: Path) -> Tensors:
    """Return all tensors of a folder by their full names.

    Raises:
        Exception: Whatever the library raises.
    """
    return _LIBRARIES[seed.library](seed, folder)


def _read_dcp(_: Seed, folder: Path) -> Tensors:
    with tempfile.TemporaryDirectory() as copy:
        if not (folder / ".metadata").exists():
            folder = _with_one_metadata(folder, Path(copy) / "copy")
        content: dict[str, Any] = {}
        _load_state_dict(
            content, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    return _flat(content)


def _with_one_metadata(folder: Path, copy: Path) -> Path:
    """Copy a folder in which every rank has metadata of its own, and put these together."""
    shutil.copytree(folder, copy)
    first, *others = (pickle.loads(file.read_bytes()) for file in sorted(folder.glob("__*.metadata")))
    for other in others:
        for name, entry in other.state_dict_metadata.items():
            known = first.state_dict_metadata.setdefault(name, entry)
            known.chunks += [chunk for chunk in entry.chunks if chunk not in known.chunks]
        first.storage_data |= other.storage_data
    (copy / ".metadata").write_bytes(pickle.dumps(first))
    return copy


def _read_torch(_: Seed, folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in {".pt", ".bin", ".pth", ".ckpt"} and file.is_file():
            tensors |= _flat(torch.load(file, weights_only=True))
    index_file = folder / "pytorch_model.bin.index.json"
    listed = json.loads(index_file.read_bytes())["weight_map"] if index_file.exists() else tensors
    return {name: tensor for name, tensor in tensors.items() if name in listed}


def _read_safetensors(_: Seed, folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _read_shards(_: Seed, folder: Path) -> Tensors:
    blocks: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            starts = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                block = opened.get_tensor(name)
                start = starts[name]["saved_offsets"] if name in starts else [0] * block.dim()
                blocks.setdefault(name, []).append((start, block))
    tensors = {}
    for name, parts in blocks.items():
        filled = [part for part in parts if part[1].numel()] or parts
        ends = ([at + size for at, size in zip(start, block.shape, strict=True)] for start, block in filled)
        full = torch.zeros([max(sizes) for sizes in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
        for start, block in filled:
            full[tuple(slice(at, at + size) for at, size in zip(start, block.shape, strict=True))] = block
        tensors[name] = full
    return tensors


def _read_ranks(seed: Seed, folder: Path) -> Tensors:
    """Put local tensors together as their ranks' coordinates on the mesh say."""
    files = {_rank(file): file for file in folder.iterdir() if file.suffix in {".pt", ".bin"} and "_rank" in file.name}
    tensors: Tensors = {}
    for rank, file in sorted(files.items()):
        if "optim" in file.name or "extra" in file.name:
            continue
        with as_rank(rank, max(files) + 1):
            for name, value in _flat(torch.load(file, weights_only=True)).items():
                if not isinstance(value, DTensor):
                    tensors.setdefault(name, value)
                    continue
                full = tensors.setdefault(name, torch.zeros(value.shape, dtype=value.dtype))
                target = _local_part(full, value)
                target.copy_(value.to_local())
    return tensors


def _local_part(full: torch.Tensor, value: DTensor) -> torch.Tensor:
    """Cut a full tensor as torch cuts it, strided shards after the others."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    order = sorted(range(value.device_mesh.ndim), key=lambda axis: hasattr(value.placements[axis], "split_factor"))
    for axis in order:
        placement = value.placements[axis]
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            pieces = full.chunk(value.device_mesh.size(axis), dim)
            full = pieces[coordinate[axis]] if coordinate[axis] < len(pieces) else full.narrow(dim, 0, 0)
    return full


def _rank(file: Path) -> int:
    return int(file.stem.rpartition("rank")[2].strip("_"))


def _flat(content: Mapping[Any, Any], prefix: str = "") -> Tensors:
    tensors: Tensors = {}
    for key, value in content.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            tensors |= _flat(value, f"{prefix}{key}.")
    return tensors


_LIBRARIES: Mapping[str, Callable[[Seed, Path], Tensors]] = {
    "dcp": _read_dcp,
    "torch": _read_torch,
    "safetensors": _read_safetensors,
    "shards": _read_shards,
    "ranks": _read_ranks,
}
