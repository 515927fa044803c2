"""Times ways of saving one sharded model, interleaved, under torchrun. Started by `bin/bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from methods import METHODS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--offload", action="store_true", help="keep the shards in pinned host memory")
    parser.add_argument("--gigabytes", type=float, help="size of the model; default 1.5, on GPUs 15.2 (a 7B)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--folder", type=Path, required=True, help="where to write; emptied after each run")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    else:
        dist.init_process_group("gloo")
    try:
        model, config = build(options)
        measure_all(model, config, options)
    finally:
        dist.destroy_process_group()


def build(options: argparse.Namespace) -> tuple[nn.Module, transformers.Qwen2Config]:
    """Make a Qwen2 of about the wanted size, in bfloat16, sharded before it has memory."""
    wanted = options.gigabytes or (15.2 if options.device == "cuda" else 1.5)
    if wanted >= 8:
        sizes: dict[str, Any] = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
        heads: dict[str, Any] = {"num_attention_heads": 28, "num_key_value_heads": 4}
    else:
        sizes = {"vocab_size": 64000, "hidden_size": 1536, "intermediate_size": 8960}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layer_bytes = 2 * (2.3 * hidden * hidden + 3 * hidden * inner)
    layers = max(round((wanted * 1e9 - 4 * sizes["vocab_size"] * hidden) / layer_bytes), 1)
    config = transformers.Qwen2Config(**sizes, **heads, num_hidden_layers=layers, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    model.bfloat16()
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=options.device == "cuda") if options.offload else OffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    model.to_empty(device="cpu" if options.offload else options.device)
    with torch.no_grad():
        for parameter in model.parameters():
            cast("DTensor", parameter).to_local().uniform_(-0.02, 0.02)
    return model, config


def measure_all(model: nn.Module, config: transformers.Qwen2Config, options: argparse.Namespace) -> None:
    """Run all methods in turn, and that several times; results are complete after every turn."""
    names = options.methods.split(",")
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            figures[name].append(measure(name, model, options.folder / name))
            if dist.get_rank() == 0:
                print(f"{name}: {figures[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
        if dist.get_rank() == 0:
            report(figures, config, options)


def measure(name: str, model: nn.Module, folder: Path) -> dict[str, float]:
    """Run one method once; figures are those of the worst rank, `written_bytes` the sum."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    device_before = torch.cuda.memory_allocated() if cuda else 0
    written_before = _written_bytes()
    with _HostMemory() as host:
        started = time.perf_counter()
        METHODS[name][1](model, folder)
        seconds = time.perf_counter() - started
    worst = torch.tensor(
        [
            seconds,
            host.peak_bytes,
            torch.cuda.max_memory_allocated() - device_before if cuda else 0,
        ],
        dtype=torch.float64,
    )
    written = torch.tensor([_written_bytes() - written_before], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(written)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    keys = ("seconds", "host_bytes", "device_bytes")
    return {**dict(zip(keys, worst.tolist(), strict=True)), "written_bytes": written.item()}


class _HostMemory:
    """The peak of memory that no file backs, above that at the start, sampled every few milliseconds."""

    def __enter__(self) -> _HostMemory:
        self._start, self.peak_bytes = _unbacked_bytes(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak_bytes = max(self.peak_bytes, _unbacked_bytes() - self._start)


def _unbacked_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * (int(fields["VmRSS"].split()[0]) - int(fields["RssFile"].split()[0]))


def _written_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def report(
    figures: dict[str, list[dict[str, float]]], config: transformers.Qwen2Config, options: argparse.Namespace
) -> None:
    rows = []
    for name, runs in figures.items():
        seconds = [run["seconds"] for run in runs]
        limit = figures.get("raw_fsync" if name in {"raw_fsync", "ours_fsync", "dcp_save"} else "raw", runs)
        rows.append(
            {
                "method": name,
                "title": METHODS[name][0],
                "min_seconds": min(seconds),
                "median_seconds": statistics.median(seconds),
                "ratio_to_raw": min(seconds) / min(run["seconds"] for run in limit),
                "host_mib": max(run["host_bytes"] for run in runs) / 2**20,
                "device_mib": max(run["device_bytes"] for run in runs) / 2**20,
                "written_gb": runs[0]["written_bytes"] / 1e9,
            }
        )
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores",
        "offload": options.offload,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "repeats": len(rows and next(iter(figures.values()))),
        "rows": rows,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "save.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{'':44} {'min s':>7} {'median':>7} {'x raw':>6} {'host MiB':>9} {'device MiB':>10} {'written GB':>10}")
    for row in rows:
        print(
            f"{row['title']:44} {row['min_seconds']:7.2f} {row['median_seconds']:7.2f} {row['ratio_to_raw']:6.2f}"
            f" {row['host_mib']:9.0f} {row['device_mib']:10.0f} {row['written_gb']:10.2f}"
        )


if __name__ == "__main__":
    main()
