"""What is delivered, by whom, in which pieces: known on every rank before the first byte moves.

What one rank holds of all the inputs of a step it can deliver alone: `local_windows` says which units each rank
delivers so, `gathered_steps` which steps need the other ranks, and `windows` cuts those into buckets of bounded size.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .dtypes import Casts
from .errors import PlanError
from .gather import GatherPlan, Slice
from .layout import DEFAULT_SHARD_SIZE, split_into_files
from .memory import without_collection
from .names import check_unique
from .spec import Box, Sharding, TensorInfo
from .steps import Rows, Step, Window
from .table import plan_table

__all__ = ["BucketPlan", "Plan", "share_out"]

_Holders = tuple[tuple[Rows, tuple[int, ...]], ...]
"""Disjoint ranges of units, and the ranks that hold what these need."""
_Layout = tuple[Sharding, tuple[int, ...]]
"""How an input lies on the ranks, and its shape."""
_Needs = tuple[int, tuple[_Layout, ...], tuple[_Layout, ...]]
"""What decides which units of a step a rank holds: their number, and the inputs by unit and those needed whole."""


class BucketPlan:
    """Windows that are gathered together.

    Args:
        windows: The windows.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self._gathers: dict[tuple[int, str], GatherPlan] = {}

    def gather(self, rank: int, device_type: str) -> GatherPlan:
        """Return how a rank gathers the inputs of all windows, in their order, on a kind of device; made once."""
        if (rank, device_type) not in self._gathers:
            slices = [
                Slice(spec, window.step.rows_of(spec, window.blocks), window.step.read_dtype or spec.dtype)
                for window in self.windows
                for spec in window.step.inputs
            ]
            self._gathers[rank, device_type] = GatherPlan(slices, rank, device_type)
        return self._gathers[rank, device_type]


@dataclass(frozen=True)
class Plan:
    """All steps of an export.

    Attributes:
        steps: In the order of the state dict, or where a step makes several outputs, of the first of each.
        ranks: The global ranks that export together.
        aliases: Names that are not delivered because they are tied, and the name that is delivered instead.
        untied: Names that count as tied but differ, so that all of them are delivered.
        names: The names of all outputs in the order of the checkpoint; empty where the steps have them in order.
        are_tied_by_hand: Whether embeddings are tied that the config declares not to be.
        blocks: Outputs that files keep together, and a number that those share which do.
        casts: What became of dtypes.
    """

    steps: tuple[Step, ...]
    ranks: tuple[int, ...] = (0,)
    aliases: tuple[tuple[str, str], ...] = ()
    untied: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    are_tied_by_hand: bool = False
    blocks: Mapping[str, int] = field(default_factory=dict)
    casts: Casts = field(default_factory=Casts)

    def __post_init__(self) -> None:
        check_unique(output.name for step in self.steps for output in step.outputs)

    @cached_property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """All outputs, in the order of the checkpoint."""
        outputs = tuple(output for step in self.steps for output in step.outputs)
        if not self.names:
            return outputs
        by_name = {output.name: output for output in outputs}
        return tuple(by_name[name] for name in self.names)

    def aliases_of(self, output: TensorInfo) -> list[TensorInfo]:
        """Return an output under the names that are tied to its own."""
        return [replace(output, name=alias) for alias, kept in self.aliases if kept == output.name]

    @property
    def num_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(output.num_bytes for output in self.outputs)

    def __str__(self) -> str:
        try:
            files = split_into_files(self.outputs, DEFAULT_SHARD_SIZE, self.blocks)
        except PlanError:  # a dtype that no file can hold may still be sent
            files = []
        return plan_table(self.outputs, files)

    @property
    def lines(self) -> Iterator[str]:
        """One line per step; equal on all ranks, or the export is refused."""
        return map(_line, self.steps)

    @cached_property
    def digest(self) -> str:
        """A hash of everything that must be equal on all ranks."""
        return _digest(self.lines)

    @cached_property
    def gathered_steps(self) -> tuple[Step, ...]:
        """Steps with rows that no rank holds whole."""
        return tuple(step for step in self.steps if not _is_local(_needs(step)))

    def local_windows(self, rank: int) -> list[Window]:
        """Return the units that a rank delivers from what it holds, so that all local units are delivered once.

        Replicas share: the rows that the same ranks hold are laid end to end, and each of them takes an equal part.
        Made once.
        """
        if rank not in self._local_windows:
            self._local_windows[rank] = self._share_of(rank)
        return self._local_windows[rank]

    @without_collection()
    def _share_of(self, rank: int) -> list[Window]:
        held: dict[tuple[int, ...], list[tuple[int, Window]]] = {}
        for position, step in enumerate(self.steps):
            for rows, ranks in _held_by(_needs(step), rank):
                held.setdefault(ranks, []).append((position, Window(step, (rows,))))
        mine = []
        for ranks, items in held.items():
            if len(ranks) == 1:
                mine += items
                continue
            windows = [window for _, window in items]
            for index, begin, end in share_out(windows, ranks.index(rank), len(ranks)):
                position, window = items[index]
                mine.append((position, Window(window.step, tuple(rows for _, rows in window.part(begin, end)))))
        return [window for _, window in sorted(mine, key=lambda item: (item[0], item[1].blocks))]

    def buckets(self, max_bytes: int, *, whole: bool, held: bool) -> list[BucketPlan]:
        """Return what to gather one after the other; made once.

        Args:
            max_bytes: As for `windows`, and so is `whole`.
            whole: Whether every output must stay in one piece.
            held: Whether what single ranks hold whole is gathered as well.
        """
        key = (max_bytes, whole, held)
        if key not in self._buckets:
            steps = self.steps if held else self.gathered_steps
            self._buckets[key] = list(map(BucketPlan, self.windows(steps, max_bytes, whole=whole)))
        return self._buckets[key]

    def in_order_of_delivery(self, bucket_bytes: int) -> Plan:
        """Return this plan with its outputs in the order in which everyone gets them whole; made once.

        Experts of a fused tensor come a bucket of them at a time, from every rank's own.

        Args:
            bucket_bytes: Bytes gathered at a time.
        """
        if bucket_bytes not in self._in_order:
            buckets = self.buckets(bucket_bytes, whole=True, held=True)
            names = tuple(info.name for bucket in buckets for window in bucket.windows for info in window.outputs)
            self._in_order[bucket_bytes] = replace(self, names=names)
        return self._in_order[bucket_bytes]

    @cached_property
    def _local_windows(self) -> dict[int, list[Window]]:
        return {}

    @cached_property
    def _in_order(self) -> dict[int, Plan]:
        return {}

    @cached_property
    def _buckets(self) -> dict[tuple[int, bool, bool], list[BucketPlan]]:
        return {}

    @without_collection()
    def windows(self, steps: Iterable[Step], max_bytes: int, *, whole: bool) -> list[list[Window]]:
        """Cut steps into buckets to gather one after the other.

        Args:
            steps: The steps.
            max_bytes: Bytes of gathered inputs per bucket. A larger unit, or with `whole` a larger step whose units
                do not make whole outputs, gets a bucket of its own.
            whole: Whether every output must stay in one piece.
        """
        buckets: list[list[Window]] = []
        room = 0
        for step in steps:
            is_one = whole and not step.is_unitwise
            for window in [Window(step, ((0, step.num_units),))] if is_one else _cut(step, max_bytes):
                num_bytes = window.num_bytes
                if not buckets or num_bytes > room:
                    buckets.append([])
                    room = max_bytes
                buckets[-1].append(window)
                room -= num_bytes
        return buckets


def share_out(windows: Sequence[Window], part: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """Lay windows end to end, cut the line into parts of equal bytes, and yield one of them.

    A cut falls between rows. Buffers are not cut but all in the first part, since their replicas may differ.

    Yields:
        For each window that lies in the part: its index, and its first unit and the one after the last, counted from
        the begin of the window.
    """
    sizes = [window.num_bytes for window in windows]
    first, last = (sum(sizes) * cut // parts for cut in (part, part + 1))
    position = 0
    for index, (window, num_bytes) in enumerate(zip(windows, sizes, strict=True)):
        num_units = window.num_units
        if num_bytes == 0 or any(spec.is_buffer for spec in window.step.inputs):
            begin, end = 0, num_units if part == 0 else 0
        else:
            begin, end = (min(max(cut - position, 0) * num_units // num_bytes, num_units) for cut in (first, last))
        if begin < end:
            yield index, begin, end
        position += num_bytes


def _needs(step: Step) -> _Needs:
    by_unit, whole = (tuple([(spec.sharding, spec.shape) for spec in specs]) for specs in (step.by_unit, step.whole))
    return step.num_units, by_unit, whole


@functools.lru_cache(maxsize=4096)
def _unit_holders(needs: _Needs) -> _Holders:
    """Return ranges of units, and the ranks that hold all that these need of every input."""
    num_units, by_unit, whole = needs
    everything = (0, num_units)
    units: _Holders = ((everything, (by_unit + whole)[0][0].mesh.ranks),)
    for sharding, shape in by_unit:
        units = _both(_row_holders(sharding, shape), units)
    for sharding, shape in whole:
        holders = next((ranks for box, ranks in sharding.holders(shape) if box == Box.whole(shape)), ())
        units = _both(units, ((everything, holders),))
    return units


@functools.lru_cache(maxsize=4096)
def _held_by(needs: _Needs, rank: int) -> _Holders:
    """Return those units that a rank holds of a step that no gather is needed for."""
    if not _is_local(needs):
        return ()
    return tuple((rows, ranks) for rows, ranks in _unit_holders(needs) if rank in ranks)


@functools.lru_cache(maxsize=4096)
def _is_local(needs: _Needs) -> bool:
    return sum(stop - first for (first, stop), _ in _unit_holders(needs)) == needs[0]


def _both(some: _Holders, others: _Holders) -> _Holders:
    """Return the ranges in which two sets of ranges overlap, with the ranks that they share."""
    overlaps = (
        ((max(low, first), min(high, stop)), tuple(rank for rank in ranks if rank in holders))
        for (low, high), ranks in some
        for (first, stop), holders in others
        if max(low, first) < min(high, stop)
    )
    return tuple((rows, ranks) for rows, ranks in overlaps if ranks)


@functools.lru_cache(maxsize=4096)
def _row_holders(sharding: Sharding, shape: tuple[int, ...]) -> _Holders:
    """Return ranges of rows of a tensor, and the ranks that hold them in full width."""
    return tuple(
        (box.rows, ranks)
        for box, ranks in sharding.holders(shape)
        if box.has_full_rows(shape) and box.rows[0] < box.rows[1]
    )


def _cut(step: Step, max_bytes: int) -> Iterator[Window]:
    """Cut a step into windows that take an equal number of units from every block of dim 0.

    Where not even one of each fits, as of the experts of a large model on many ranks, blocks are cut one by one.
    """
    if not step.by_unit or 0 < step.num_units * step.unit_bytes <= max_bytes:
        yield Window(step, ((0, step.num_units),))
        return
    spec = step.by_unit[0]
    blocks = sorted({box.rows for box, _ in spec.sharding.holders(spec.shape) if box.rows[0] < box.rows[1]})
    fitting = max_bytes // step.unit_bytes if step.unit_bytes else step.num_units
    groups = [blocks] if fitting >= len(blocks) else [[block] for block in blocks]
    rows = max(fitting // max(len(groups[0]), 1), 1) if groups else 1
    for group in groups:
        for begin in range(0, max((stop - first for first, stop in group), default=0), rows):
            parts = ((first + begin, min(first + begin + rows, stop)) for first, stop in group)
            yield Window(step, tuple(part for part in parts if part[0] < part[1]))


def _line(step: Step) -> str:
    inputs = (
        f"{spec.name} {list(spec.shape)} {spec.dtype}{' whole' if spec in step.whole else ''} buffer={spec.is_buffer}"
        f" {_text(spec.sharding)}"
        for spec in step.inputs
    )
    everything = (0, step.num_units)
    rows_of = {
        part.info.name: f" of rows {part.rows}" + (f" at {part.inner}" if part.inner is not None else "")
        for part in step.parts
        if part.rows != everything or part.inner is not None
    }
    outputs = (f"{info.name} {list(info.shape)} {info.dtype}{rows_of.get(info.name, '')}" for info in step.outputs)
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


@functools.lru_cache(maxsize=4096)
def _text(sharding: Sharding) -> str:
    return f"mesh={sharding.mesh.shape} ranks={_digest(map(str, sharding.mesh.ranks))} cuts={sharding.cuts}"


def _digest(lines: Iterable[str]) -> str:
    hashed = hashlib.sha256()
    for line in lines:
        hashed.update(f"{line}\n".encode())
    return hashed.hexdigest()[:16]
