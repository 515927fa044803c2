"""Times getting every full tensor of a sharded model onto every rank, for several numbers of ranks.

Each number is a run of `walk.py` under torchrun, with all its methods in turn. Started by `bin/bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from measuring import TORCHRUN, publish

_COUNTS = (1, 2, 4, 8)
_COLUMNS = [
    ("min s", "min_seconds", ".4f"),
    ("median s", "median_seconds", ".4f"),
    ("GB/s", "gigabytes_per_second", ".1f"),
    ("of limit", "of_limit", ".2f"),
    ("x loop", "speedup", ".2f"),
    ("device MiB", "device_mib", ",.0f"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", help="numbers of ranks, with commas; default 1,2,4,8, as many as there are GPUs")
    parser.add_argument("--models", help="as for walk.py; default a 7B, on the CPU a tiny one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", help="not used")
    parser.add_argument("--folder", type=Path, required=True, help="for the results of each number")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    num_devices = torch.cuda.device_count()
    most = num_devices or len(os.sched_getaffinity(0))
    counts = [int(count) for count in options.counts.split(",")] if options.counts else _COUNTS
    models = options.models or ("dense-7b" if num_devices else "dense-tiny")
    runs = [measure(count, models, options) for count in counts if options.counts or count <= most]
    facts = {
        **runs[-1],
        "title": f"Full tensors on each of several ranks, {runs[-1]['device']}, torch {runs[-1]['torch']}",
        "rows": [row for run in runs for row in run["rows"]],
    }
    del facts["ranks"]  # each row has its own
    publish(options.results / "scaling.json", facts, _COLUMNS)


def measure(num_ranks: int, models: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run `walk.py` on some ranks; return its results, with the number in the titles."""
    results = options.folder / str(num_ranks)
    command = [*TORCHRUN, str(num_ranks), str(Path(__file__).with_name("walk.py")), "--no-offload", "--models", models]
    command += ["--repeats", str(options.repeats), "--results", str(results)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    run: dict[str, Any] = json.loads((results / "walk.json").read_text())
    limits = {row["model"]: row["min_seconds"] for row in run["rows"] if row["method"] == "limit"}
    for row in run["rows"]:
        row["ranks"] = num_ranks
        row["title"] = f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}: {row['title']}"
        row["of_limit"] = limits[row["model"]] / row["min_seconds"]
    return run


if __name__ == "__main__":
    main()
