"""Draws the results of a benchmark beside them as SVG: one bar per method, shortest time, whisker to the median."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    results = Path(sys.argv[1])
    facts = json.loads(results.read_text())
    rows = facts["rows"][::-1]
    figure, axes = plt.subplots(figsize=(6, 0.35 * len(rows) + 1))
    colors = [_color(row["method"]) for row in rows]
    shortest = [row["min_seconds"] for row in rows]
    whiskers = [row["median_seconds"] - row["min_seconds"] for row in rows]
    axes.barh([row["title"] for row in rows], shortest, xerr=[[0] * len(rows), whiskers], color=colors)
    for position, row in enumerate(rows):
        speed = row.get("gigabytes_per_second")
        second = f"{row['host_mib']:,.0f} MiB" if speed is None else f"{speed:,.0f} GB/s"
        text = f" {row['min_seconds']:.3g} s, {second}"
        axes.text(max(row["min_seconds"], row["median_seconds"]), position, text, va="center", fontsize=8)
    axes.set_xlim(0, 1.35 * max(row["median_seconds"] for row in rows))
    axes.set_xlabel(f"seconds, minimum of interleaved runs (whisker: median)\nand {facts['second']}")
    axes.set_title(facts["title"], fontsize=10)
    axes.margins(y=0.5 / len(rows))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(results.with_suffix(".svg"), bbox_inches="tight")


def _color(method: str) -> str:
    """Return the color of a bar: of ours, of what bounds it, or of a peer."""
    if method.startswith("ours"):
        return "#1f6f8b"
    return "#e8d5a9" if method.startswith(("limit", "raw", "copy")) else "#b8c4c9"


if __name__ == "__main__":
    main()
