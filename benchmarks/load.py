"""Times ways of loading a Hugging Face folder into one sharded model, interleaved, under torchrun.

Started by `bin/bench --load`. The folder is in the page cache, unless `--cold` asks for the disk. Every method fills
the same shards, whose values are compared each time with those that were saved.
"""

from __future__ import annotations

import argparse
import gc
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from measuring import publish, summary
from safetensors.torch import load_file
from save import build
from sharded_model import facts_of, process_group
from timing import in_turn, timed
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_export import load_checkpoint, save_checkpoint
from fsdp_export.agreement import fingerprint
from fsdp_export.memory import bytes_of

Method = Callable[[nn.Module, Path], None]

_COLUMNS = [
    ("min s", "min_seconds", ".3f"),
    ("median s", "median_seconds", ".3f"),
    ("x raw", "ratio", ".2f"),
    ("GB a rank", "read_gb", ".3f"),
    ("host MiB", "host_mib", ",.0f"),
    ("device MiB", "device_mib", ",.0f"),
]
_CHUNK_BYTES = 16 << 20


def ours(model: nn.Module, folder: Path) -> None:
    load_checkpoint(model, folder)


def raw(_: nn.Module, folder: Path) -> None:
    """Read as many bytes as the rank holds, from as many threads as fsdp-export has, each into the same memory."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    total, rank, size = sum(sizes), dist.get_rank(), dist.get_world_size()
    first, stop, begin = total * rank // size, total * (rank + 1) // size, 0
    chunks: list[tuple[int, int, int]] = []
    handles = [os.open(file, os.O_RDONLY) for file in files]
    for handle, num_bytes in zip(handles, sizes, strict=True):
        low, high = max(first - begin, 0), min(stop - begin, num_bytes)
        chunks += [(handle, at, min(at + _CHUNK_BYTES, high)) for at in range(low, high, _CHUNK_BYTES)]
        begin += num_bytes
    threads = min(8 if torch.cuda.is_available() else 4, len(os.sched_getaffinity(0)))
    buffers = [memoryview(bytearray(_CHUNK_BYTES)) for _ in range(threads)]

    def read(turn: int) -> None:
        for handle, first, end in chunks[turn::threads]:
            at = first
            while at < end:
                at += os.preadv(handle, [buffers[turn][: end - at]], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    for handle in handles:
        os.close(handle)


def hf_reader(model: nn.Module, folder: Path) -> None:
    state_dict = model.state_dict()
    dcp.load(state_dict, storage_reader=HuggingFaceStorageReader(str(folder)), planner=DefaultLoadPlanner())


def everywhere(model: nn.Module, folder: Path) -> None:
    """Load the whole model on every rank, and take its shards from it."""
    whole = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    full = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = cast("DTensor", parameter)
            value = full[name].detach().to(shard.device_mesh.device_type)
            mine = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
            shard.to_local().copy_(mine.to_local())


def broadcast(model: nn.Module, folder: Path) -> None:
    """Load the whole model on rank 0, which gives the others theirs."""
    full: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for file in folder.glob("*.safetensors"):
            full |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)


METHODS: dict[str, tuple[str, Method]] = {
    "raw": ("raw parallel read of as many bytes", raw),
    "ours": ("fsdp-export", ours),
    "hf_reader": ("HuggingFaceStorageReader, DefaultLoadPlanner", hf_reader),
    "everywhere": ("from_pretrained on every rank", everywhere),
    "broadcast": ("rank 0 loads, broadcast_from_rank0", broadcast),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--offload", action="store_true", help="keep the shards in pinned host memory")
    parser.add_argument("--cold", action="store_true", help="ask the kernel to forget the files before each run")
    parser.add_argument("--gigabytes", type=float, help="size of the model; default 1.5, on GPUs 15.2 (a 7B)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--folder", type=Path, required=True, help="where to save what is loaded")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    with process_group(options.device):
        model, config = build(options)
        folder = options.folder / "checkpoint"
        save_checkpoint(model, folder, fsync=False)
        expected = checksums(model)
        in_turn(
            options.methods.split(","),
            options.repeats,
            lambda name: measure(name, model, folder, expected, is_cold=options.cold),
            lambda figures: report(figures, model, config, options),
        )


def shards(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [cast("DTensor", parameter).to_local().detach() for parameter in model.parameters()]


def checksums(model: nn.Module) -> list[str | int]:
    return [
        fingerprint(shard) if shard.is_cuda else zlib.crc32(bytes_of(shard).numpy().data) for shard in shards(model)
    ]


def forget(folder: Path) -> None:
    os.sync()
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(name: str, model: nn.Module, folder: Path, expected: list[str | int], *, is_cold: bool) -> dict[str, float]:
    """Run one method once, and look at what it has loaded."""
    for shard in shards(model):
        shard.zero_()
    gc.collect()
    if is_cold and dist.get_rank() == 0:
        forget(folder)
    figures = timed(lambda: METHODS[name][1](model, folder))
    if name != "raw" and checksums(model) != expected:
        raise SystemExit(f"{name} has loaded other values")
    return figures


def report(
    figures: dict[str, list[dict[str, float]]],
    model: nn.Module,
    config: transformers.Qwen2Config,
    options: argparse.Namespace,
) -> None:
    rows = [summary(name, METHODS[name][0], runs, figures.get("raw", runs)) for name, runs in figures.items()]
    ranks = facts_of(options.device)
    held = sum(shard.nbytes for shard in shards(model))
    on = f"{ranks['ranks']} ranks, {ranks['device']}, torch {ranks['torch']}"
    facts = {
        "title": f"Loading {sum(parameter.nbytes for parameter in model.parameters()) / 1e9:.1f} GB on {on}",
        "second": "extra host memory per rank",
        **ranks,
        "offload": options.offload,
        "cold": options.cold,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "held_gb": held / 1e9,
        "repeats": len(next(iter(figures.values()))),
        "rows": rows,
    }
    publish(options.results / "load.json", facts, _COLUMNS)
    print(f"rank 0 holds {held / 1e9:.3f} GB", flush=True)


if __name__ == "__main__":
    main()
