"""Times what an export does besides moving bytes: planning, and a second walk. Started by `bin/bench --planning`.

Every case runs in a process of its own, as one rank of a group whose other ranks are simulated. The second walk is that
of a single rank over tensors of a few bytes, so that all of its time is overhead.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend
from measuring import machine, publish, summary, unbacked_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_export import Exporter

_CASES = [(1_000, 2), (10_000, 2), (100_000, 2), (100_000, 64), (100_000, 1024)]
_COLUMNS = [
    ("min s", "min_seconds", ".3f"),
    ("median s", "median_seconds", ".3f"),
    ("host MiB", "host_mib", ",.0f"),
    ("walk us", "walk_microseconds", ".1f"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="tensors and ranks of one case, with a comma; prints its figures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="not used")
    parser.add_argument("--ranks", help="not used")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        num_tensors, num_ranks = map(int, options.case.split(","))
        print(json.dumps(measure(num_tensors, num_ranks)))
        return
    rows = []
    for num_tensors, num_ranks in _CASES:
        command = [sys.executable, __file__, "--case", f"{num_tensors},{num_ranks}"]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(options.repeats)]
        row = summary("ours", f"{num_tensors:,} tensors, rank 0 of {num_ranks:,}", runs, runs)
        rows.append({**row, "walk_microseconds": min(run["walk_microseconds"] for run in runs)})
    facts = {"title": "Planning", "second": "host memory", "machine": machine(), "torch": torch.__version__}
    publish(options.results / "planning.json", {**facts, "repeats": options.repeats, "rows": rows}, _COLUMNS)


def measure(num_tensors: int, num_ranks: int) -> dict[str, float]:
    """Plan for one rank of many, then walk twice as the only one; processor seconds, since others use the machine."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=num_ranks)
    exporter = Exporter(_model(num_tensors, num_ranks))
    gc.collect()  # or the collector would now and then look at all the tensors that were just made
    before, started = unbacked_bytes(), time.process_time()
    plan = exporter.plan
    assert plan.digest
    plan.local_windows(0)
    plan.buckets(1 << 30, whole=True, held=True)
    seconds = time.process_time() - started
    host_bytes = max(unbacked_bytes(), _peak_bytes()) - before
    dist.destroy_process_group()
    del exporter, plan
    figures = {"seconds": seconds, "host_bytes": host_bytes, "written_bytes": 0.0}
    return {**figures, "walk_microseconds": _second_walk(num_tensors)}


def _second_walk(num_tensors: int) -> float:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exporter = Exporter(_model(num_tensors, 1))
    for _ in range(2):
        started = time.process_time()
        num_walked = sum(1 for _ in exporter.tensors())
        seconds = time.process_time() - started
    assert num_walked == num_tensors
    dist.destroy_process_group()
    return 1e6 * seconds / num_tensors


def _peak_bytes() -> int:
    """Return the largest memory of this process so far, less what files back now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - int(fields["RssFile"].split()[0]))


def _model(num_tensors: int, num_ranks: int) -> nn.Module:
    """Make a module of sharded tensors of few bytes."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = nn.Module()
    for index in range(num_tensors):
        if index % 1000 == 0:
            layer = nn.Module()
            model.add_module(f"layer_{index}", layer)
        local = torch.zeros(max(8 // num_ranks, 1), 4)
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        layer.register_parameter(f"weight_{index}", nn.Parameter(value))
    return model


if __name__ == "__main__":
    main()
