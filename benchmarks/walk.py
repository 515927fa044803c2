"""Times ways of getting every full tensor of a sharded model onto every rank, under torchrun. Started by `bin/bench`.

Of each model and placement all methods run in turn, several times; the first turn, which plans and fills the caches of
allocators, is reported apart. Limits of the machine are measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from measuring import publish, summary
from sharded_model import SIZES, facts_of, process_group, sharded
from timing import timed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_export import Exporter
from fsdp_export.compat import all_gather_into

Walk = Callable[[], Iterator[tuple[str, torch.Tensor]]]

_LIMIT_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_COLUMNS = [
    ("first s", "first_seconds", ".3f"),
    ("min s", "min_seconds", ".4f"),
    ("median s", "median_seconds", ".4f"),
    ("GB/s", "gigabytes_per_second", ".1f"),
    ("x loop", "speedup", ".2f"),
    ("device MiB", "device_mib", ",.0f"),
    ("host MiB", "host_mib", ",.0f"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="", help=f"of {', '.join(SIZES)}; default: all, on the CPU tiny ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-offload", action="store_true", help="leave out the models with shards in host memory")
    parser.add_argument("--folder", type=Path, help="not used")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    with process_group(options.device):
        default = "dense-7b,dense-0.5b,moe" if options.device == "cuda" else "dense-tiny,moe-tiny"
        rows: list[dict[str, Any]] = []
        for kind in (options.models or default).split(","):
            for offloads in [False] if options.no_offload or options.device == "cpu" else [False, True]:
                rows += measure_model(kind, options, offloads=offloads)
                report(rows, options)


def measure_model(kind: str, options: argparse.Namespace, *, offloads: bool) -> list[dict[str, Any]]:
    """Run all methods on one model."""
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy()
    model = sharded(SIZES[kind](), mesh, "cpu" if offloads else options.device, policy)
    exporter = Exporter(model)
    raw = Exporter(model, lora="keep", adapter=_Unchanged()) if kind.startswith("moe") else None
    walks: dict[str, tuple[str, Walk]] = {
        "loop": ("full_tensor() of each", partial(_loop, model, options.device)),
        "ours": ("fsdp-export", exporter.tensors),
    }
    if raw is not None:
        walks["loop_cut"] = ("full_tensor() of each, cut into experts", partial(_loop_cut, model, options.device))
        walks["ours_fused"] = ("fsdp-export, experts left fused", raw.tensors)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in walks}
    for _ in range(1 + options.repeats):
        for name, (_, walk) in walks.items():
            figures[name].append(measure(walk))
    place = "host memory, pinned" if offloads else options.device
    num_bytes = figures["ours"][0]["num_bytes"]
    limit = host_limit(num_bytes, options) if offloads else gather_limit(num_bytes, options)
    figures["limit"] = [limit] * 2
    walks["limit"] = (
        "limit: copies of its share from pinned memory" if offloads else "limit: one all-gather",
        _nothing,
    )
    rows = []
    for name, (title, _) in walks.items():
        first, *runs = figures[name]
        row = summary(name, f"{kind}, {place}: {title}", runs, figures["loop"][1:])
        row |= {"model": kind, "place": place, "num_tensors": first["num_tensors"], "num_bytes": first["num_bytes"]}
        row |= {"first_seconds": first["seconds"], "speedup": 1 / row["ratio"]}
        row["gigabytes_per_second"] = runs[0]["num_bytes"] / row["min_seconds"] / 1e9
        rows.append(row)
    del model, exporter, raw, walks
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return rows


class _Unchanged:
    """An adapter that leaves everything as it is."""

    @staticmethod
    def to_hf(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return state_dict


def _nothing() -> Iterator[tuple[str, torch.Tensor]]:
    yield from ()


def _loop(model: nn.Module, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What trainers do today: bring each shard to the device, gather it, hand it on."""
    for name, value in model.state_dict().items():
        if not isinstance(value, DTensor):
            yield name, value
        else:
            yield name, cast("DTensor", value.to(device, non_blocking=True)).full_tensor()


def _loop_cut(model: nn.Module, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """As `_loop`, with fused experts cut into a view for each projection of each, as an engine wants them."""
    for name, value in _loop(model, device):
        if ".experts." not in name:
            yield name, value
            continue
        for index, expert in enumerate(value):
            for part in expert.chunk(2) if "gate_up" in name else [expert]:
                yield f"{name}.{index}", part


def measure(walk: Walk) -> dict[str, float]:
    """Drain a walk once."""
    num_tensors = num_bytes = 0

    def drain() -> None:
        nonlocal num_tensors, num_bytes
        for _, tensor in walk():
            num_tensors += 1
            num_bytes += tensor.nbytes
            del tensor

    return {**timed(drain, empties_cache=False), "num_tensors": num_tensors, "num_bytes": num_bytes}


def gather_limit(num_bytes: float, options: argparse.Namespace) -> dict[str, float]:
    """Time an all-gather of the largest useful size, and scale it to the bytes of a model."""
    size = _LIMIT_BYTES[options.device]
    shard = torch.zeros(size // dist.get_world_size(), dtype=torch.uint8, device=options.device)
    output = torch.empty(shard.numel() * dist.get_world_size(), dtype=torch.uint8, device=options.device)
    return _limit(lambda: all_gather_into(output, shard), output.numel(), num_bytes, options)


def host_limit(num_bytes: float, options: argparse.Namespace) -> dict[str, float]:
    """Time the copy of pinned memory to the device, on all ranks at once, and scale it to a rank's share."""
    pinned = torch.empty(_LIMIT_BYTES["cuda"], dtype=torch.uint8, pin_memory=True)
    output = torch.empty_like(pinned, device=options.device)
    share = num_bytes / dist.get_world_size()
    figures = _limit(lambda: output.copy_(pinned, non_blocking=True), pinned.numel(), share, options)
    return {**figures, "num_bytes": num_bytes}


def _limit(work: Callable[[], object], size: int, num_bytes: float, options: argparse.Namespace) -> dict[str, float]:
    best = float("inf")
    for _ in range(1 + options.repeats):
        dist.barrier()
        if options.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            work()
        if options.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / 4)
    worst = torch.tensor([best], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    seconds = worst.item() * num_bytes / size
    zeros = dict.fromkeys(("host_bytes", "device_bytes", "written_bytes", "num_tensors"), 0.0)
    return {"seconds": seconds, "num_bytes": num_bytes, **zeros}


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if dist.get_rank() != 0:
        return
    ranks = facts_of(options.device)
    facts = {
        "title": f"Full tensors on each of {ranks['ranks']} ranks, {ranks['device']}, torch {ranks['torch']}",
        "second": "gigabytes per second",
        **ranks,
        "repeats": options.repeats,
        "rows": rows,
    }
    publish(options.results / "walk.json", facts, _COLUMNS)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
