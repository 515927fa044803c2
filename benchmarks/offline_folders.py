"""Saves one sharded model as DCP, verl and accelerate do. Started by `offline.py` with torchrun.

With `--sparse` nothing is filled in: the files have their full sizes, but what would be weights are holes in them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from rank_folders import rank_file, save_as_accelerate, save_as_verl
from sharded_model import config_of, sharded, sharded_on_meta
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from fsdp_export.layout import split_into_files
from fsdp_export.spec import TensorInfo

_HOLE_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--sparse", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        # verl's merger knows a mesh by this name only.
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        config = config_of(options.gigabytes, torch.float32)
        if options.sparse:
            save_sparse(options.folder, config, sharded_on_meta(config, mesh))
        else:
            save(options.folder, config, sharded(config, mesh, "cpu"))
    finally:
        dist.destroy_process_group()


def save(folder: Path, config: transformers.Qwen2Config, model: nn.Module) -> None:
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
    save_as_verl(folder / "verl", model)
    save_as_accelerate(folder / "accelerate", model, StateDictType.SHARDED_STATE_DICT)
    save_as_accelerate(folder / "accelerate-ranks", model, StateDictType.SHARDED_STATE_DICT, use_dcp=False)
    _save_config(folder, config, "dcp", "verl/huggingface", "accelerate", "accelerate-ranks")


def save_sparse(folder: Path, config: transformers.Qwen2Config, model: nn.Module) -> None:
    state_dict = {name: _zeros_like(cast("DTensor", value)) for name, value in model.state_dict().items()}
    writer = dcp.FileSystemWriter(folder / "dcp")
    writer.fs = _SparseFileSystem()
    dcp.save(state_dict, storage_writer=writer)
    rank, size = dist.get_rank(), dist.get_world_size()
    (folder / "verl").mkdir(exist_ok=True)
    with _SparseFile(folder / "verl" / rank_file(rank, size), "wb") as file:
        torch.save(state_dict, file)
    if rank == 0:
        (folder / "verl" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))
        (folder / "hf").mkdir()
        infos = [TensorInfo(name, tuple(value.shape), value.dtype) for name, value in state_dict.items()]
        for layout in split_into_files(infos, "5GB"):
            with (folder / "hf" / layout.name).open("wb") as hf_file:
                hf_file.write(layout.header)
                hf_file.truncate(layout.num_bytes)
    _save_config(folder, config, "dcp", "verl/huggingface", "hf")


def _save_config(folder: Path, config: transformers.Qwen2Config, *places: str) -> None:
    if dist.get_rank() == 0:
        for place in places:
            config.save_pretrained(folder / place)


def _zeros_like(tensor: DTensor) -> DTensor:
    """Make a DTensor of zeros that have no memory as long as they are only read."""
    zeros = np.zeros(tuple(tensor.to_local().shape), dtype=np.float32)
    return DTensor.from_local(
        torch.from_numpy(zeros),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class _SparseFile(io.FileIO):
    """A file that leaves a hole for whatever is large, which here is zeros."""

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < _HOLE_BYTES:
            return super().write(data)
        self.seek(size, os.SEEK_CUR)
        return size


class _SparseFileSystem(FileSystem):
    """Lets DCP write such data files."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        is_data = Path(path).suffix == ".distcp" and mode == "wb"
        with _SparseFile(path, mode) if is_data else Path(path).open(mode) as stream:
            yield cast("io.IOBase", stream)


if __name__ == "__main__":
    main()
