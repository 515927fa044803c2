"""Times ways of merging a sharded checkpoint, interleaved, and copying its bytes. Started by `bin/bench --offline`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import NOT_INSTALLED, TORCHRUN, Peak, machine, publish, summary, unbacked_bytes, written_bytes

_HERE = Path(__file__).parent
_PACKAGES = {"torch", "transformers", "accelerate", "verl"}
_HOST_MIB = 300
_COLUMNS = [
    ("min s", "min_seconds", ".2f"),
    ("median s", "median_seconds", ".2f"),
    ("x cp", "ratio", ".2f"),
    ("CPU s", "cpu_seconds", ".2f"),
    ("process s", "process_seconds", ".1f"),
    ("host MiB", "host_mib", ",.0f"),
    ("written GB", "written_gb", ".2f"),
]
_MEMORY_COLUMNS = [_COLUMNS[0], *_COLUMNS[5:]]


@dataclass(frozen=True)
class Method:
    """A way of making one checkpoint.

    Attributes:
        title: What it is called.
        folder: Which folder it reads.
        command: A shell's command, for which `$0` is the source and `$1` the output; or a function of
            `offline_methods.py` and its arguments.
        ranks: On how many it runs.
        reference: The copy it is compared with.
        rival: Which of ours reads the same and writes the same.
        at_most: How many times the reference it may take.
    """

    title: str
    folder: str
    command: str
    ranks: int = 0
    reference: str = "cp"
    rival: str = ""
    at_most: float | None = None

    @property
    def is_shell(self) -> bool:
        """Whether a shell runs it, and not our worker."""
        return "$0" in self.command


_SYNC = 'find "$1" -type f -exec sync {} +'
METHODS = {
    "cp": Method("cp -r", "dcp", 'cp -r "$0" "$1"'),
    "cp_plain": Method("cp -r --reflink=never", "dcp", 'cp -r --reflink=never "$0" "$1"'),
    "ours": Method("fsdp-export, DCP", "dcp", "ours", at_most=1.3),
    "ours_bf16": Method("fsdp-export, DCP, to bf16", "dcp", "ours bfloat16", at_most=2.0),
    "ours_2": Method("fsdp-export, DCP, 2 ranks", "dcp", "ours", ranks=2),
    "ours_2_bf16": Method("fsdp-export, DCP, 2 ranks, to bf16", "dcp", "ours bfloat16", ranks=2),
    "dcp": Method("dcp_to_torch_save", "dcp", "dcp_to_torch_save", rival="ours"),
    "ours_accelerate": Method("fsdp-export, accelerate", "accelerate", "ours", at_most=1.3),
    "accelerate": Method("accelerate merge-weights", "accelerate", "accelerate", rival="ours_accelerate"),
    "ours_files": Method("fsdp-export, accelerate's rank files", "accelerate-ranks", "ours", at_most=1.3),
    "ours_verl": Method("fsdp-export, verl", "verl", "ours", at_most=1.3),
    "ours_verl_bf16": Method("fsdp-export, verl, to bf16", "verl", "ours bfloat16", at_most=2.0),
    "verl": Method("verl.model_merger (to bf16)", "verl", "verl", rival="ours_verl_bf16"),
    "cp_fsync": Method("cp -r, fsync", "dcp", f'cp -r "$0" "$1" && {_SYNC}', reference="cp_fsync"),
    "ours_fsync": Method("fsdp-export, DCP, fsync", "dcp", "ours keep fsync", reference="cp_fsync"),
    "ours_bf16_fsync": Method("fsdp-export, DCP, to bf16, fsync", "dcp", "ours bfloat16 fsync", reference="cp_fsync"),
}
SPARSE_METHODS = {
    **{name: METHODS[name] for name in ("ours", "ours_bf16", "ours_verl", "ours_verl_bf16")},
    "ours_hf": Method("fsdp-export, safetensors", "hf", "ours"),
    "ours_hf_bf16": Method("fsdp-export, safetensors, to bf16", "hf", "ours bfloat16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model, in float32")
    parser.add_argument("--sparse-gb", type=float, help="only the memory, on files of this size that are all holes")
    parser.add_argument("--ranks", type=int, default=2, help="how many saved the checkpoint")
    parser.add_argument("--repeats", type=int, help="default 5; 1 with --sparse-gb")
    parser.add_argument("--methods", help="default: all")
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    is_sparse = options.sparse_gb is not None
    options.gigabytes = options.sparse_gb if is_sparse else options.gigabytes
    methods = SPARSE_METHODS if is_sparse else METHODS
    if options.methods:
        methods = {name: methods[name] for name in options.methods.split(",")}
    make_folders(options, is_sparse=is_sparse)
    measure_all(methods, options, "offline-memory" if is_sparse else "offline")


def make_folders(options: argparse.Namespace, *, is_sparse: bool) -> None:
    script = [str(_HERE / "offline_folders.py"), "--folder", str(options.folder), *(["--sparse"] if is_sparse else [])]
    subprocess.run([*TORCHRUN, str(options.ranks), *script, "--gigabytes", str(options.gigabytes)], check=True)
    for folder in sorted(path for path in options.folder.iterdir() if path.is_dir()):
        sizes = [file.stat() for file in folder.rglob("*") if file.is_file()]
        on_disk = sum(size.st_blocks for size in sizes) * 512
        print(f"{folder.name}: {sum(size.st_size for size in sizes):,} bytes, {on_disk:,} on disk", file=sys.stderr)


def measure_all(methods: dict[str, Method], options: argparse.Namespace, name_of_results: str) -> None:
    """Run all methods in turn, and that several times; results are complete after every turn."""
    is_sparse = options.sparse_gb is not None
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    versions = {name: each.version for each in importlib.metadata.distributions() if (name := each.name) in _PACKAGES}
    for repeat in range(options.repeats or (1 if is_sparse else 5)):
        for name in list(runs):
            run = measure(methods[name], options.folder, is_warm=not is_sparse)
            if run is None:
                del runs[name]
                continue
            runs[name].append(run)
            print(f"{name}: {run['seconds']:.2f} s, {run['host_bytes'] / 2**20:.0f} MiB", file=sys.stderr, flush=True)
        rows = [
            summary(name, methods[name].title, taken, runs.get(methods[name].reference, taken))
            for name, taken in runs.items()
        ]
        facts = {
            "title": f"Merging {options.gigabytes:g} GB of {options.ranks} ranks, {machine()}",
            "second": "peak host memory of a process",
            "versions": versions,
            "ranks": options.ranks,
            "device": machine(),
            "repeats": repeat + 1,
            "goals": list(goals(methods, {row["method"]: row for row in rows})),
            "rows": rows,
        }
        publish(options.results / f"{name_of_results}.json", facts, _MEMORY_COLUMNS if is_sparse else _COLUMNS)
        print(*facts["goals"], sep="\n", flush=True)


def goals(methods: dict[str, Method], rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what is wanted, a line each, and whether it was found."""
    for name, row in rows.items():
        method = methods[name]
        if method.at_most is not None and method.reference in rows:
            yield _goal(f"{method.title}: at most {method.at_most} x cp", row["ratio"], row["ratio"] <= method.at_most)
        if method.rival in rows:
            ratio = row["min_seconds"] / rows[method.rival]["min_seconds"]
            yield _goal(f"{method.title}: at least 3 x ours", ratio, ratio >= 3)
        if name.startswith("ours"):
            yield _goal(f"{method.title}: at most {_HOST_MIB} MiB", row["host_mib"], row["host_mib"] <= _HOST_MIB)


def _goal(wanted: str, found: float, is_met: bool) -> str:  # noqa: FBT001
    return f"{'met' if is_met else 'MISSED':7} {wanted}: {found:.4g}"


def measure(method: Method, folder: Path, *, is_warm: bool) -> dict[str, float] | None:
    """Run a method once, in processes of its own; return None if what it needs is not installed."""
    source, out = folder / method.folder, folder / "out"
    written_before, cpu_before = written_bytes(), _cpu_of_children()
    with tempfile.TemporaryDirectory(dir=folder) as signals, (Path(signals) / "log").open("wb") as log:
        if method.is_shell:
            prepare(folder, source, is_warm=is_warm)
        started, waited = time.perf_counter(), 0.0
        process = subprocess.Popen(command_of(method, source, out, Path(signals)), stdout=log, stderr=log)
        processes = [process.pid]
        with Peak(lambda: max(map(unbacked_bytes, processes))) as host:
            if not method.is_shell and wait_until_loaded(process, method, Path(signals)):
                processes += [int(file.read_text()) for file in Path(signals).glob("ready-*")]
                loaded = time.perf_counter()
                prepare(folder, source, is_warm=is_warm)
                waited = time.perf_counter() - loaded
                (Path(signals) / "go").touch()
            status = process.wait()
        process_seconds = time.perf_counter() - started - waited
        told = Path(log.name).read_text()
        if status == NOT_INSTALLED:
            print(f"{method.title} is left out: {told.splitlines()[-1]}", file=sys.stderr)
            return None
        if status:
            sys.exit(f"{method.title} failed:\n{told}")
        work = [json.loads(file.read_text()) for file in Path(signals).glob("done-*")]
    out.rename(folder / "old")
    return {
        "seconds": max((times["seconds"] for times in work), default=process_seconds),
        "cpu_seconds": sum(times["cpu_seconds"] for times in work) if work else _cpu_of_children() - cpu_before,
        "process_seconds": process_seconds,
        "host_bytes": host.value,
        "written_bytes": written_bytes() - written_before,
    }


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def command_of(method: Method, source: Path, out: Path, signals: Path) -> list[str]:
    if method.is_shell:
        return ["sh", "-c", method.command, str(source), str(out)]
    launcher = [*TORCHRUN, str(method.ranks)] if method.ranks else [sys.executable]
    name, *rest = method.command.split()
    return [*launcher, str(_HERE / "offline_methods.py"), name, str(source), str(out), str(signals), *rest]


def wait_until_loaded(process: subprocess.Popen[bytes], method: Method, signals: Path) -> bool:
    while process.poll() is None:
        if len(list(signals.glob("ready-*"))) == max(method.ranks, 1):
            return True
        time.sleep(0.01)
    return False


def prepare(folder: Path, source: Path, *, is_warm: bool) -> None:
    """Give every method the same start: what the last one wrote has just been deleted, and the source is in memory."""
    shutil.rmtree(folder / "old", ignore_errors=True)
    os.sync()
    for path in source.rglob("*") if is_warm else ():
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


if __name__ == "__main__":
    main()
