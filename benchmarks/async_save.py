"""Times how long a training loop stands still for a save, and how long its steps take meanwhile, under torchrun.

Started by `bin/bench --async`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from measuring import Peak, publish, summary, unbacked_bytes, written_bytes
from methods import SHARD_SIZE
from save import build
from sharded_model import facts_of, process_group
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_export import Exporter

Wait = Callable[[], object]
"""Waits until what was begun has ended."""

_COLUMNS = [
    ("first s", "first_seconds", ".3f"),
    ("min s", "min_seconds", ".3f"),
    ("median s", "median_seconds", ".3f"),
    ("x copy", "ratio", ".2f"),
    ("complete s", "complete_seconds", ".2f"),
    ("step x", "step_ratio", ".3f"),
    ("host MiB", "host_mib", ",.0f"),
    ("device MiB", "device_mib", ",.0f"),
]


class Loop:
    """A sharded model, and ways to save it; each begins a save and returns what waits for its end.

    On GPUs the model is trained meanwhile, on CPUs, where a step of it takes longer than a save, a small one.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        self.model = model
        self.exporter = Exporter(model)
        self._tokens = torch.arange(num_tokens, device="cuda" if num_tokens else "cpu").view(1, -1) % 1000
        layers = (layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU()))
        self._small = nn.Sequential(*layers)
        self.num_steps = 3 if num_tokens else 50
        trained = model if num_tokens else self._small
        self._optimizer = torch.optim.SGD(trained.parameters(), lr=1e-6)
        with torch.no_grad():
            values = [cast("DTensor", parameter).to_local().detach() for parameter in model.parameters()]
        self._rows = [value.view(-1) for value in values if value.numel()]
        self._copies: list[torch.Tensor] = []
        # What a library does on a thread must not meet what training does.
        self.others_group = dist.new_group(backend="gloo")
        self._group = dist.new_group(backend="gloo")

    def step(self) -> float:
        """Train a step; return the seconds."""
        started = time.perf_counter()
        if self._tokens.numel():
            self.model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        else:
            self._small(torch.ones(256, 512)).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        _synchronize()
        return time.perf_counter() - started

    def copy(self, _: Path) -> Wait:
        """Copy this rank's rows into host memory that is there, pinned if they are on a device, with one thread."""
        if not self._copies:
            is_pinned = self._rows[0].is_cuda
            self._copies = [torch.empty_like(rows, device="cpu", pin_memory=is_pinned).zero_() for rows in self._rows]
        started = time.perf_counter()
        for copy, rows in zip(self._copies, self._rows, strict=True):
            copy.copy_(rows, non_blocking=True)
        _synchronize()
        seconds = time.perf_counter() - started
        return lambda: seconds

    def blocking(self, folder: Path) -> Wait:
        """Save, and return when that has ended."""
        self.exporter.save(folder, max_shard_size=SHARD_SIZE)
        return lambda: None

    def later(self, folder: Path, staging: str) -> Wait:
        """Save, and return as soon as that can go on alone."""
        return self.exporter.save(folder, blocking=False, staging=staging, max_shard_size=SHARD_SIZE).wait

    def dcp_async(self, folder: Path) -> Wait:
        """Save as DCP does, with its own defaults."""
        begun: Any = dcp.async_save(self.model.state_dict(), checkpoint_id=folder, process_group=self.others_group)
        return cast("Future[object]", begun).result

    def are_all(self, *, is_true: bool) -> bool:
        """Tell whether something is true on all ranks."""
        value = torch.tensor(float(is_true))
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return bool(value.item())


METHODS: dict[str, tuple[str, Callable[[Loop, Path], Wait]]] = {
    "copy": ("copy of the rows into host memory, one thread", Loop.copy),
    "ours_device": ("fsdp-export, blocking=False, device", lambda loop, folder: loop.later(folder, "device")),
    "ours_host": ("fsdp-export, blocking=False, host", lambda loop, folder: loop.later(folder, "host")),
    "ours_blocking": ("fsdp-export", Loop.blocking),
    "dcp_async": ("dcp.async_save (not a Hugging Face folder)", Loop.dcp_async),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--offload", action="store_true", help="keep the shards in pinned host memory")
    parser.add_argument("--gigabytes", type=float, help="size of the model; default 1.5, on GPUs 15.2 (a 7B)")
    parser.add_argument("--repeats", type=int, default=3, help="after a first time, which is told apart")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, on GPUs")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--folder", type=Path, required=True, help="where to write; emptied after each run")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    with process_group(options.device):
        model, config = build(options)
        measure_all(Loop(model, options.tokens if options.device == "cuda" else 0), config, options)


def measure_all(loop: Loop, config: transformers.Qwen2Config, options: argparse.Namespace) -> None:
    """Run all methods in turn, and that several times; results are complete after every turn but the first."""
    names = [name for name in options.methods.split(",") if options.device == "cuda" or name != "ours_device"]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    loop.step()
    for repeat in range(options.repeats + 1):
        for name in names:
            figures[name].append(measure(name, loop, options.folder / name))
            if dist.get_rank() == 0:
                print(f"{name}: {figures[name][-1]}", file=sys.stderr, flush=True)
        if dist.get_rank() == 0 and repeat:
            report(figures, config, options)


def measure(name: str, loop: Loop, folder: Path) -> dict[str, float]:
    """Save once, and train until that has ended; figures are those of the worst rank, `written_bytes` the sum."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    alone = statistics.median([loop.step() for _ in range(loop.num_steps)])
    _synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    device_before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    host_before, written_before = unbacked_bytes(), written_bytes()
    with Peak(lambda: unbacked_bytes() - host_before) as host:
        started = time.perf_counter()
        wait = METHODS[name][1](loop, folder)
        stood_still = time.perf_counter() - started
        device_bytes = torch.cuda.max_memory_allocated() - device_before if torch.cuda.is_available() else 0
        steps = _train_until(loop, wait)
        seconds = wait()
        complete = time.perf_counter() - started
    if isinstance(seconds, float):  # a copy, whose memory was made before
        stood_still = complete = seconds
    values = [stood_still, complete, statistics.median(steps) / alone, alone, host.value, device_bytes]
    worst = torch.tensor(values, dtype=torch.float64)
    written = torch.tensor([written_bytes() - written_before], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(written)
    dist.barrier()
    keys = ("seconds", "complete_seconds", "step_ratio", "step_seconds", "host_bytes", "device_bytes")
    return {**dict(zip(keys, worst.tolist(), strict=True)), "written_bytes": written.item()}


def _train_until(loop: Loop, wait: Wait) -> list[float]:
    """Train until all ranks have saved; return the seconds of each step."""
    is_done = getattr(getattr(wait, "__self__", None), "done", lambda: True)
    steps = []
    while True:
        steps += [loop.step() for _ in range(loop.num_steps // 3)]
        if loop.are_all(is_true=is_done()):
            return steps


def report(
    figures: dict[str, list[dict[str, float]]], config: transformers.Qwen2Config, options: argparse.Namespace
) -> None:
    rows = []
    for name, (first, *runs) in figures.items():
        row = summary(name, METHODS[name][0], runs, figures["copy"][1:])
        row["first_seconds"] = first["seconds"]
        row["complete_seconds"] = min(run["complete_seconds"] for run in runs)
        row["step_ratio"] = min(run["step_ratio"] for run in runs)
        row["step_seconds"] = min(run["step_seconds"] for run in runs)
        rows.append(row)
    ranks = facts_of(options.device)
    size = max(row["written_gb"] for row in rows)
    on = f"{ranks['ranks']} ranks, {ranks['device']}, torch {ranks['torch']}"
    facts = {
        "title": f"Standing still for a save of {size:.1f} GB, {on}",
        "second": "extra host memory per rank",
        **ranks,
        "offload": options.offload,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "repeats": len(next(iter(figures.values()))) - 1,
        "rows": rows,
    }
    publish(options.results / "async_save.json", facts, _COLUMNS)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
