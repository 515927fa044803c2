"""A plan for people to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .layout import FileLayout
from .spec import TensorInfo

__all__ = ["dtype_name", "human_bytes", "plan_table", "rank_ranges", "summary"]


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, as `max_shard_size` counts: 15.2 GB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


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


def summary(outputs: Iterable[TensorInfo]) -> str:
    """Return one line: 339 tensors, 15.2 GB, bfloat16."""
    outputs = list(outputs)
    dtypes = [dtype_name(dtype) for dtype, _ in Counter(output.dtype for output in outputs).most_common()]
    count = f"{len(outputs):,} tensor" + ("s" if len(outputs) != 1 else "")
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
    header = ("name", "shape", "dtype", "bytes", "file" if files else "")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    total = summary(outputs) + (f", {len(files)} file" + ("s" if len(files) != 1 else "") if files else "")
    return "\n".join([*lines, total])
