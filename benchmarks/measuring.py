"""What the benchmarks share: memory that no file backs, bytes written and read, tables and results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "NOT_INSTALLED",
    "TORCHRUN",
    "Peak",
    "machine",
    "publish",
    "read_bytes",
    "summary",
    "unbacked_bytes",
    "written_bytes",
]

Run = Mapping[str, float]
"""What was measured once; `seconds` is compared."""
Column = tuple[str, str, str]
"""A heading, the key of a row, and how its values are formatted."""

NOT_INSTALLED = 69
"""Exit status of a method whose packages are not there."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
"""A command that lacks a number of ranks, and what they run."""

_SECONDS_BETWEEN = 0.005


class Peak:
    """The largest value of something, sampled from a thread every few milliseconds."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read, self.value = read, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN):
            self.value = max(self.value, self._read())


def unbacked_bytes(process: int | str = "self") -> int:
    """Return the memory of a process that no file backs; 0 for one that is gone."""
    try:
        fields = _fields(process, "status")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = [fields[name].split()[0] for name in ("VmRSS", "RssFile") if name in fields]
    return 1024 * (int(sizes[0]) - int(sizes[1])) if sizes else 0


def written_bytes() -> int:
    """Return what this process, and those of its children that it has waited for, gave to system calls that write."""
    return int(_fields("self", "io")["wchar"])


def read_bytes() -> int:
    """Return what this process got from system calls that read."""
    return int(_fields("self", "io")["rchar"])


def _fields(process: int | str, file: str) -> dict[str, str]:
    lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


def machine() -> str:
    """Return what kind of host this is."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def summary(name: str, title: str, runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Any]:
    """Make a row of the table: shortest and median time, the ratio to a reference, and the largest of the rest."""
    seconds = [run["seconds"] for run in runs]
    row = {
        "method": name,
        "title": title,
        "min_seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "ratio": min(seconds) / min(run["seconds"] for run in reference),
        "host_mib": max(run["host_bytes"] for run in runs) / 2**20,
    }
    for key, total in (("written_bytes", "written_gb"), ("read_bytes", "read_gb")):
        if key in runs[0]:
            row[total] = max(run[key] for run in runs) / 1e9
    if "device_bytes" in runs[0]:
        row["device_mib"] = max(run["device_bytes"] for run in runs) / 2**20
    for key in ("cpu_seconds", "process_seconds"):
        if key in runs[0]:
            row[key] = min(run[key] for run in runs)
    return row


def publish(file: Path, facts: Mapping[str, Any], columns: Iterable[Column]) -> None:
    """Write all that was found as JSON, and print its rows as a table."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **facts}, indent=2) + "\n")
    columns, rows = list(columns), facts["rows"]
    width = max(len(row["title"]) for row in rows)
    print(" " * width, *(f"{heading:>11}" for heading, _, _ in columns))
    for row in rows:
        print(f"{row['title']:{width}}", *(f"{row[key]:11{form}}" for _, key, form in columns), flush=True)
