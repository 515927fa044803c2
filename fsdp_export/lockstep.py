"""The lockstep pass: buckets are gathered on all ranks, one after the other, each while the one before it is used.

Ranks meet at a fence before every gather, with all memory already there, so that between the fence and the collective
nothing is left that could fail on one rank alone: a rank that fails earlier is heard of at the fence, and none is left
waiting inside a collective. A slow consumer is waited for at the fence too, whose waits end only with a dead rank.
Loop variables are deleted: they would keep a bucket while the next is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from .fence import Operation
from .gather import Slice
from .plan import BucketPlan, Plan, share_out
from .sources.base import Source
from .steps import Piece, Rows, Step, Window

__all__ = ["GatheredBucket", "gathered_buckets", "gathered_pieces"]


@dataclass(frozen=True, slots=True)
class GatheredBucket:
    """Gathered windows: the rows of every input of every window, in order, valid once `event` has happened."""

    windows: Sequence[Window]
    tensors: Sequence[torch.Tensor]
    event: Any

    def completed(self, operation: Operation) -> GatheredBucket:
        """Wait for the device, and tie the memory to the stream of the consumer as well."""
        if self.event is not None:
            operation.wait(self.event.query)
            if self.tensors:
                consumer = _current_stream(self.tensors[0].device)
                for tensor in self.tensors:
                    tensor.record_stream(consumer)
        return self

    def pieces(self) -> Iterator[Piece]:
        """Yield the outputs of windows that hold whole steps, or units that outputs come whole with."""
        for window, inputs in self._items():
            if len(window.blocks) == 1:
                yield from window.step.convert(inputs, window.blocks[0][0])
                continue
            row = 0
            for first, stop in window.blocks:
                yield from _converted(window.step, inputs, row, (first, stop))
                row += stop - first

    def part(self, part: int, parts: int) -> Iterator[Piece]:
        """Yield what one of several ranks delivers."""
        items = list(self._items())
        for index, begin, end in share_out(self.windows, part, parts):
            window, inputs = items[index]
            for row, units in window.part(begin, end):
                yield from _converted(window.step, inputs, row, units)

    def _items(self) -> Iterator[tuple[Window, list[torch.Tensor]]]:
        tensors = iter(self.tensors)
        for window in self.windows:
            yield window, [next(tensors) for _ in window.step.inputs]


def _converted(step: Step, inputs: list[torch.Tensor], row: int, units: Rows) -> Iterator[Piece]:
    """Convert a range of units, whose rows begin at a row of the inputs."""
    rows, num_by_unit = slice(row, row + units[1] - units[0]), len(step.by_unit)
    mine = [tensor[rows] if tensor.dim() else tensor for tensor in inputs[:num_by_unit]]
    yield from step.convert(mine + inputs[num_by_unit:], units[0])


def gathered_pieces(
    plan: Plan, source: Source, operation: Operation, bucket_bytes: int, *, aliases: bool = False
) -> Iterator[Piece]:
    """Yield every output whole, in the order of the plan's steps, on the source's device.

    What each unit of a step makes whole, such as an expert, comes unit by unit, a bucket of units at a time. With
    `aliases` a tied tensor comes once more under each of its other names, right behind.

    Collective: every rank of the plan must drain this. A tensor lives on while the consumer holds it; at most two
    buckets are held here.
    """
    for bucket in gathered_buckets(plan.buckets(bucket_bytes, whole=True, held=True), source, operation):
        for piece in bucket.pieces():
            yield piece
            for info in plan.aliases_of(piece.info) if aliases else ():
                yield replace(piece, info=info)
            del piece
        del bucket


def gathered_buckets(buckets: Sequence[BucketPlan], source: Source, operation: Operation) -> Iterator[GatheredBucket]:
    """Yield buckets one after the other, with the next one already on its way.

    On a device shards come from the host on one stream while the bucket before them is gathered on another one.
    """
    reads, gathers = _side_streams(source.device) if source.device.type != "cpu" else (None, None)
    ahead: GatheredBucket | None = None
    for bucket in buckets:
        plan = bucket.gather(source.rank)
        if reads is not None and gathers is not None:
            # What training or the consumer has queued comes first; a bucket it still reads is not free yet.
            queued = _current_stream(source.device).record_event()
            reads.wait_event(queued)
            gathers.wait_event(queued)
            operation.wait(queued.query)
        with _on(reads):
            blocks = [_block(each, held, source) for each, held in zip(plan.slices, plan.held, strict=True)]
        with _on(gathers):
            gather = plan.begin(blocks, source.groups)
        operation.agree()
        with _on(gathers):
            if gathers is not None:
                gathers.wait_stream(reads)
                for block in blocks:
                    block.record_stream(gathers)
            gather.launch()
            current = GatheredBucket(bucket.windows, gather.outputs, _event(gathers))
        del blocks, gather
        if ahead is not None:
            yield ahead.completed(operation)
        ahead = current
        del current
    if ahead is not None:
        yield ahead.completed(operation)


def _block(each: Slice, held: Sequence[Rows], source: Source) -> torch.Tensor:
    """Bring this rank's block of a slice to the device."""
    rows = [source.rows(each.spec, *part) for part in held]
    if each.spec.sharding.is_replicated or rows[0].device != source.device:
        # What no collective copies is copied here: a consumer must never hold the module's own memory.
        is_async, copy = source.device.type != "cpu", each.spec.sharding.is_replicated
        # Each by itself: what the host puts together or casts is slower to make, and not pinned.
        rows = [part.to(source.device, non_blocking=is_async, copy=copy) for part in rows]
    block = torch.cat(rows) if len(rows) > 1 else rows[0]
    return (block if block.dtype == each.dtype else block.to(each.dtype)).contiguous()


@functools.cache
def _side_streams(device: torch.device) -> tuple[Any, Any]:
    """Return the streams of a device for reads and gathers, always the same: the allocator keeps their memory apart."""
    module = torch.get_device_module(device)
    return module.Stream(device), module.Stream(device)


def _current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


def _on(stream: Any) -> AbstractContextManager[object]:
    return stream if stream is not None else nullcontext()


def _event(stream: Any) -> Any:
    return stream.record_event() if stream is not None else None
