"""The one walk: what a rank holds, then what all gather in lockstep. Files and engines differ only in the sink."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import accumulate

import torch

from .fence import Operation
from .lockstep import gathered_buckets, gathered_pieces
from .plan import Plan
from .sinks.base import Sink
from .sources.base import Source
from .steps import Piece, Rows, Step, StoredPiece
from .threads import do_all

__all__ = ["CHUNK_BYTES", "Delivered", "finish", "run", "walk"]

CHUNK_BYTES = 32 << 20
"""Bytes a rank reads at a time of what it holds: bounds the host memory of a cast and the time between two checks."""

Delivered = Callable[[int], None]
"""Called with the bytes of outputs that were just delivered by this rank."""

_MAX_THREADS = 4
# What is read comes into new memory, which is used again, and stays in the processor's cache, if it is small.
_READ_BYTES = 1 << 20


def run(
    plan: Plan,
    source: Source,
    sink: Sink,
    operation: Operation,
    *,
    bucket_bytes: int,
    gather_all: bool = False,
    delivered: Delivered = lambda _: None,
) -> None:
    """Deliver a plan to a sink. Collective: every rank of the plan must call this.

    After an error the sink must be aborted, but only when the ranks have left the operation: what one rank undoes
    must not be what another one fails of.

    Args:
        plan: What to deliver.
        source: Where the inputs are.
        sink: Where the outputs go.
        operation: The fence's operation under which this runs.
        bucket_bytes: Bytes of inputs that are gathered at a time.
        gather_all: Whether to send every tensor through the device, held or not. The result is the same.
        delivered: Progress.
    """
    is_lead = source.rank == plan.ranks[0]
    told = plan.in_order_of_delivery(bucket_bytes) if sink.delivery == "everyone" else plan
    sink.check = operation.check
    cards = operation.agree(sink.card())
    ticket = operation.agree(sink.begin(told, cards) if is_lead else "")[0]
    sink.open(told, source.rank, ticket)
    operation.agree()
    walk(plan, source, sink, operation, bucket_bytes=bucket_bytes, gather_all=gather_all, delivered=delivered)
    finish(sink, operation, is_lead=is_lead)


def finish(sink: Sink, operation: Operation, *, is_lead: bool) -> None:
    """Close a sink that has all pieces, and commit it. Collective."""
    sink.close()
    operation.agree()
    if is_lead:
        sink.commit()
    operation.agree()


def walk(
    plan: Plan,
    source: Source,
    sink: Sink,
    operation: Operation,
    *,
    bucket_bytes: int,
    gather_all: bool,
    delivered: Delivered,
) -> None:
    """Hand every piece of a plan to an open sink.

    Loop variables are deleted: they would keep a bucket while the next is gathered.
    """
    counting = threading.Lock()

    def deliver(piece: Piece | StoredPiece) -> None:
        operation.check()
        if isinstance(piece, StoredPiece):
            sink.copy(piece)
        else:
            sink.write(piece)
        with counting:
            delivered(piece.num_bytes)

    if sink.delivery == "everyone":
        for piece in gathered_pieces(plan, source, operation, bucket_bytes, aliases=sink.wants_aliases):
            deliver(piece)
            del piece
        return
    if not gather_all:
        _deliver_held(plan, source, sink, deliver)
    position = plan.ranks.index(source.rank)
    for bucket in gathered_buckets(plan.buckets(bucket_bytes, whole=False, held=gather_all), source, operation):
        for piece in bucket.part(position, len(plan.ranks)):
            deliver(piece)
            del piece
        del bucket


def _deliver_held(plan: Plan, source: Source, sink: Sink, deliver: Callable[[Piece | StoredPiece], None]) -> None:
    """Deliver what this rank can from the rows it holds, with several threads where source and sink can take that."""
    if not (source.is_concurrent and sink.is_concurrent):
        for step, rows in _held(plan, source.rank):
            _deliver_rows(step, rows, source, sink, deliver)
        return
    alone = threading.Lock()

    def deliver_rows(item: tuple[Step, Rows]) -> None:
        step, units = item
        # Tensors that are needed whole may be large, and what converts them may be no friend of threads.
        with alone if step.whole else nullcontext():
            _deliver_rows(step, units, source, sink, deliver)

    do_all(deliver_rows, _held(plan, source.rank), most=_MAX_THREADS, name="fsdp-export-walk")


def _held(plan: Plan, rank: int) -> Iterator[tuple[Step, Rows]]:
    """Yield the units that a rank delivers alone, a chunk at a time. Each begins elsewhere, mostly in another file."""
    windows = [window for window in plan.local_windows(rank) if window.num_bytes]
    ends = list(accumulate(window.num_bytes for window in windows))
    begin = ends[-1] * plan.ranks.index(rank) // len(plan.ranks) if ends else 0
    turn = next((index for index, end in enumerate(ends) if end > begin), 0)
    for window in windows[turn:] + windows[:turn]:
        for block in window.blocks:
            for units in _chunks(window.step, block, CHUNK_BYTES):
                yield window.step, units


def _chunks(step: Step, units: Rows, max_bytes: int) -> Iterator[Rows]:
    """Cut a range of units so that the rows that they need for themselves are no larger than that."""
    count = max(max_bytes // max(sum(spec.row_bytes for spec in step.by_unit), 1), 1)
    for first in range(*units, count):
        yield first, min(first + count, units[1])


def _deliver_rows(
    step: Step, units: Rows, source: Source, sink: Sink, deliver: Callable[[Piece | StoredPiece], None]
) -> None:
    """Deliver units of a step: from file to file what lies on disk as it is to be written, the rest through memory."""
    stored = _stored_pieces(step, units, source) if step.keeps_bytes and sink.copies_files else None
    if stored is not None:
        for stored_piece in stored:
            deliver(stored_piece)
        return
    whole = [_cast(source.rows(spec, 0, spec.num_rows), step.read_dtype) for spec in step.whole]
    for chunk in _chunks(step, units, _READ_BYTES if source.is_concurrent else CHUNK_BYTES):
        by_unit = [_cast(source.rows(spec, *chunk), step.read_dtype) for spec in step.by_unit]
        for piece in step.convert(by_unit + whole, chunk[0]):
            deliver(piece)


def _stored_pieces(step: Step, units: Rows, source: Source) -> list[StoredPiece] | None:
    """Return the outputs of units as they lie in files; None where one does not."""
    pieces = []
    for part in step.parts:
        inside = part.within(*units)
        if inside is not None:
            first_row, rows = inside
            extents = source.extents(step.by_unit[0], *rows)
            if extents is None:
                return None
            pieces.append(StoredPiece(part.info, first_row, extents))
    return pieces


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)
