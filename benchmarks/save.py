"""Times ways of saving one sharded model, interleaved, under torchrun. Started by `bin/bench`."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from measuring import publish, summary
from methods import METHODS
from sharded_model import config_of, facts_of, process_group, sharded
from timing import in_turn, timed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

_COLUMNS = [
    ("min s", "min_seconds", ".2f"),
    ("median s", "median_seconds", ".2f"),
    ("x raw", "ratio", ".2f"),
    ("host MiB", "host_mib", ",.0f"),
    ("device MiB", "device_mib", ",.0f"),
    ("written GB", "written_gb", ".2f"),
]


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
    with process_group(options.device):
        model, config = build(options)
        in_turn(
            options.methods.split(","),
            options.repeats,
            lambda name: measure(name, model, options.folder / name),
            lambda figures: report(figures, config, options),
        )


def build(options: argparse.Namespace) -> tuple[nn.Module, transformers.Qwen2Config]:
    gigabytes = options.gigabytes or (15.2 if options.device == "cuda" else 1.5)
    config = config_of(gigabytes, torch.bfloat16)
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=options.device == "cuda") if options.offload else OffloadPolicy()
    return sharded(config, mesh, "cpu" if options.offload else options.device, policy), config


def measure(name: str, model: nn.Module, folder: Path) -> dict[str, float]:
    """Run one method once."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    figures = timed(lambda: METHODS[name][1](model, folder))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def report(
    figures: dict[str, list[dict[str, float]]], config: transformers.Qwen2Config, options: argparse.Namespace
) -> None:
    rows = []
    for name, runs in figures.items():
        reference = "raw_fsync" if name in {"raw_fsync", "ours_fsync", "dcp_save"} else "raw"
        rows.append(summary(name, METHODS[name][0], runs, figures.get(reference, runs)))
    ranks = facts_of(options.device)
    on = f"{ranks['ranks']} ranks, {ranks['device']}, torch {ranks['torch']}"
    facts = {
        "title": f"Saving {rows[0]['written_gb']:.1f} GB from {on}",
        "second": "extra host memory per rank",
        **ranks,
        "offload": options.offload,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "repeats": len(next(iter(figures.values()))),
        "rows": rows,
    }
    publish(options.results / "save.json", facts, _COLUMNS)


if __name__ == "__main__":
    main()
