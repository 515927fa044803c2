"""What is compared: each writes the same sharded model into a folder, and is called on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_export import Exporter
from fsdp_export.layout import split_into_files

Method = Callable[[nn.Module, Path], None]

SHARD_SIZE = "5GB"
_CHUNK_BYTES = 32 << 20


def ours(model: nn.Module, folder: Path) -> None:
    Exporter(model).save(folder, max_shard_size=SHARD_SIZE, fsync=False)


def ours_fsync(model: nn.Module, folder: Path) -> None:
    Exporter(model).save(folder, max_shard_size=SHARD_SIZE)


def raw(model: nn.Module, folder: Path) -> None:
    _raw_write(model, folder, fsync=False)


def raw_fsync(model: nn.Module, folder: Path) -> None:
    _raw_write(model, folder, fsync=True)


def full_gather(model: nn.Module, folder: Path) -> None:
    state_dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        cast("transformers.PreTrainedModel", model).save_pretrained(
            folder, state_dict=state_dict, max_shard_size=SHARD_SIZE
        )
    dist.barrier()


def hf_writer(model: nn.Module, folder: Path) -> None:
    state_dict = model.state_dict()
    files = split_into_files(Exporter(model).plan.outputs, SHARD_SIZE)
    index = {name: number for number, file in enumerate(files, 1) for name in file.offsets}
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=index,
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=len(files),
    )
    dcp.save({name: value for name, value in state_dict.items() if name in index}, storage_writer=writer)


def dcp_save(model: nn.Module, folder: Path) -> None:
    dcp.save(model.state_dict(), checkpoint_id=folder)


METHODS: dict[str, tuple[str, Method]] = {
    "raw": ("raw parallel write of the same files", raw),
    "ours": ("fsdp-export", ours),
    "raw_fsync": ("raw parallel write, fsync", raw_fsync),
    "ours_fsync": ("fsdp-export, fsync", ours_fsync),
    "dcp_save": ("dcp.save (fsyncs; not a Hugging Face folder)", dcp_save),
    "full_gather": ("get_model_state_dict + save_pretrained", full_gather),
    "hf_writer": ("HuggingFaceStorageWriter, consolidated", hf_writer),
}


def _raw_write(model: nn.Module, folder: Path, *, fsync: bool) -> None:
    """Write files of the right sizes, each rank an equal run of bytes, from one warm buffer in host memory.

    On a GPU host from as many threads as fsdp-export has there.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    files = split_into_files(Exporter(model).plan.outputs, SHARD_SIZE)
    if rank == 0:
        folder.mkdir(parents=True)
        for file in files:
            with (folder / file.name).open("wb") as new_file:
                new_file.truncate(file.num_bytes)
    dist.barrier()
    total = sum(file.num_bytes for file in files)
    first, stop = total * rank // size, total * (rank + 1) // size
    buffer = torch.full((_CHUNK_BYTES,), 7, dtype=torch.uint8).numpy().data
    begin = 0
    for file in files:
        low, high = max(first - begin, 0), min(stop - begin, file.num_bytes)
        begin += file.num_bytes
        if low >= high:
            continue
        handle = os.open(folder / file.name, os.O_WRONLY)

        def write(at: int, handle: int = handle, high: int = high) -> None:
            os.pwrite(handle, buffer[: min(_CHUNK_BYTES, high - at)], at)

        with ThreadPoolExecutor(4 if torch.cuda.is_available() else 1) as threads:
            list(threads.map(write, range(low, high, _CHUNK_BYTES)))
        if fsync:
            os.fsync(handle)
        os.close(handle)
    dist.barrier()
