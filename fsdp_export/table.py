"""A plan for people to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .layout import FileLayout
from .spec import TensorInfo

__all__ = ["counted", "dtype_name", "human_bytes", "plan_table", "rank_ranges", "summary"]

_STEP = 1000
_HEADER = ("name", "shape", "dtype", "bytes", "file")


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, as `max_shard_size` counts: 15.2 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    size, unit = float(num_bytes), units.pop(0)
    while round(size) >= _STEP and units:
        size, unit = size / _STEP, units.pop(0)
    return f"{size:,.0f} {unit}" if size >= _STEP / 10 else f"{size:.3g} {unit}"


def dtype_name(dtype: object) -> str:
    """Return the bare name of a torch dtype: bfloat16."""
    return str(dtype).removeprefix("torch.")


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ascending ranks as text, with runs as ranges: ranks 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'rank' if is_one else 'ranks'} {', '.join(texts)}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number and what it counts: 1 tensor, 1,024 tensors, 2 entries."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def summary(outputs: Iterable[TensorInfo]) -> str:
    """Return one line: 339 tensors, 15.2 GB, bfloat16."""
    outputs = list(outputs)
    dtypes = [dtype_name(dtype) for dtype, _ in Counter(output.dtype for output in outputs).most_common()]
    count = counted(len(outputs), "tensor")
    return f"{count}, {human_bytes(sum(output.num_bytes for output in outputs))}, {' and '.join(dtypes) or 'empty'}"


def plan_table(outputs: Sequence[TensorInfo], files: Sequence[FileLayout] = ()) -> str:
    """Return a table of name, shape, dtype, bytes and file, and a last line with the totals."""
    file_of = {name: file.name for file in files for name in file.offsets}
    rows = [
        (
            output.name,
            "x".join(map(str, output.shape)) or "scalar",
            dtype_name(output.dtype),
            f"{output.num_bytes:,}",
            file_of.get(output.name, ""),
        )
        for output in outputs
    ]
    table = [_HEADER if files else (*_HEADER[:-1], ""), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = _HEADER.index("bytes")
    lines = [
        "  ".join(
            cell.rjust(width) if column == right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    total = summary(outputs) + (f", {len(files)} file" + ("s" if len(files) != 1 else "") if files else "")
    return "\n".join([*lines, total])
