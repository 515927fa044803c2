"""The lockstep pass: buckets are gathered on all ranks, one after the other, each while the one before it is used.

Ranks meet at a fence before every gather, with all memory already there, so that between the fence and the collective
nothing is left that could fail on one rank alone: a rank that fails earlier is heard of at the fence, and none is left
waiting inside a collective. A slow consumer is waited for at the fence too, whose waits end only with a dead rank.
Loop variables are deleted: they would keep a bucket while the next is gathered.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from .fence import Operation
from .gather import GatherPlan, Slice
from .plan import BucketPlan, Plan, share_out
from .sources.base import Source
from .steps import Piece, Rows, Step, Window

__all__ = ["GatheredBucket", "gathered_buckets", "gathered_pieces", "on_stream"]


@dataclass(slots=True)
class GatheredBucket:
    """Gathered windows: the rows of every input of every window, in order, valid once it is completed.

    Attributes:
        windows: The windows.
        tensors: The rows.
        strangers: Those of them whose memory is not of the stream of the consumer.
        stream: That stream, as it was when the memory was taken.
        read: What is read of the source's memory on the device, until they are there.
        event: Happens when the rows are there.
    """

    windows: Sequence[Window]
    tensors: Sequence[torch.Tensor]
    strangers: Sequence[torch.Tensor]
    stream: Any
    read: Sequence[torch.Tensor]
    event: Any = None

    def complete(self, operation: Operation) -> None:
        """Wait for the device. Memory that is not of the current stream is tied to it."""
        if self.event is not None:
            operation.wait(self.event.query)
            current = _current_stream(self.stream.device)
            for tensor in self.strangers if current == self.stream else self.tensors:
                tensor.record_stream(current)
        self.read = ()

    def abandon(self, gathers: Any) -> None:
        """Keep the memory until what is queued has read or written it, though nobody wants that any more."""
        for tensor in (*self.tensors, *self.read) if gathers is not None else ():
            tensor.record_stream(gathers)

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
    in_flight: deque[GatheredBucket] = deque()
    try:
        for bucket in buckets:
            consumer = _idle_stream(source.device, operation)
            plan = bucket.gather(source.rank, source.device.type)
            with on_stream(reads):
                blocks, made, read = _blocks(plan, source)
            gather = plan.begin(blocks, source.groups, lambda: on_stream(gathers))
            operation.agree()
            in_flight.append(GatheredBucket(bucket.windows, gather.outputs, gather.uncut, consumer, read))
            with on_stream(gathers):
                if gathers is not None:
                    gathers.wait_stream(reads)
                    gathers.wait_stream(consumer)
                    for block in made:
                        block.record_stream(gathers)
                gather.launch()
                in_flight[-1].event = gathers.record_event() if gathers is not None else None
            del blocks, made, read, gather
            if len(in_flight) > 1:
                yield _completed(in_flight, operation)
        while in_flight:
            yield _completed(in_flight, operation)
    finally:
        for left in in_flight:
            left.abandon(gathers)


def _completed(in_flight: deque[GatheredBucket], operation: Operation) -> GatheredBucket:
    in_flight[0].complete(operation)
    return in_flight.popleft()


def _idle_stream(device: torch.device, operation: Operation) -> Any:
    """Return the current stream of a device, None on the CPU.

    What training or the consumer has queued there comes first: a bucket that it still reads is not free yet.
    """
    if device.type == "cpu":
        return None
    stream = _current_stream(device)
    operation.wait(stream.record_event().query)
    return stream


def _blocks(plan: GatherPlan, source: Source) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's block of every slice, on the device, those that were made here, and what is read there."""
    blocks, made, read = [], [], []
    for each, held in zip(plan.slices, plan.held, strict=True):
        rows = [source.rows(each.spec, *part) for part in held]
        block = rows[0]
        # What no collective copies is copied here: a consumer must never hold the module's own memory.
        is_ready = len(rows) == 1 and _is_ready(block, each.dtype, source.device)
        is_copied = each.spec.sharding.is_replicated or not is_ready
        if is_copied:
            block = _made(rows, each, source.device)
            made.append(block)
        blocks.append(block)
        # Of files rows come in new memory of this stream: of what is copied at once nothing need be kept.
        if rows[0].device.type != "cpu" and not (is_copied and source.folder is not None):
            read += rows
    return blocks, made, read


def _is_ready(block: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return block.dtype == dtype and block.device == device and block.is_contiguous()


def _made(rows: Sequence[torch.Tensor], each: Slice, device: torch.device) -> torch.Tensor:
    """Bring the rows of a block to a device, in their dtype."""
    is_async, copy = device.type != "cpu", each.spec.sharding.is_replicated
    # Each by itself: what the host puts together or casts is slower to make, and not pinned.
    rows = [part.to(device, non_blocking=is_async, copy=copy) for part in rows]
    return (torch.cat(rows) if len(rows) > 1 else rows[0]).to(each.dtype).contiguous()


@functools.cache
def _side_streams(device: torch.device) -> tuple[Any, Any]:
    """Return the streams of a device for reads and gathers, always the same: the allocator keeps their memory apart."""
    module = torch.get_device_module(device)
    return module.Stream(device), module.Stream(device)


def _current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[object]:
    """Enter a stream, None on the CPU; a cached one must not be entered by itself, which two threads could not do."""
    return torch.get_device_module(stream.device).stream(stream) if stream is not None else nullcontext()
