"""Blocks of tensors -> wider blocks, along one axis of a mesh: the collectives, and which tensors go through which.

Bytes are moved, not values: gloo knows no fp8 and no unsigned types.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .compat import all_gather_into, sent_together
from .memory import bytes_of
from .spec import Mesh

__all__ = ["Axis", "Direct", "Packed", "Part", "Send", "Stage", "stages"]

Axis = tuple[Mesh, int]
"""An axis of a mesh."""

# Below this many gathered bytes a collective costs more than the copies in and out of a shared one: measured with NCCL
# over NVLink, and with gloo, for which copies cost far more.
_SMALL_BYTES, _SMALL_BYTES_ON_CPU = 32 << 20, 2 << 20
_BATCH_BYTES = 128 << 20
# More memory behind an output than this share of it is not worth the copies that it spares.
_LACKING_SHARE = 1 / 8
# Copied as they are; what else there is (fp8, unsigned types) as bytes.
_COPIED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})


class Part:
    """One tensor on its way through one all-gather.

    Attributes:
        index: Its place in the bucket.
        sizes: Sizes of the blocks of all ranks in the dim that is gathered.
        shape: Shape of what comes out: the blocks of all ranks, side by side in that dim.
        is_even: Whether all blocks are equal and their bytes lie one after the other in what comes out.
        is_direct: Whether they can be received there: they are rows, cut as `torch.chunk` does, and what the last
            blocks lack is a small part of it.
        is_short: Whether this rank's block is smaller than the largest.
        num_outer: How many runs of bytes a block has: the product of the dims before the one that is gathered.
        row_bytes: Bytes of such a run for each of `sizes`.
        slot_bytes: Bytes that every rank sends: those of the largest block.
        gathered_bytes: Those of all ranks.
        sender: The only rank along the axis with a block, if there is but one.
        packed_dtype: The dtype in which it is copied to and from scratch memory.
    """

    __slots__ = (
        *("gathered_bytes", "index", "is_direct", "is_even", "is_short", "num_outer", "packed_dtype"),
        *("row_bytes", "sender", "shape", "sizes", "slot_bytes"),
    )

    def __init__(
        self, index: int, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.index, self.sizes = index, sizes
        total, largest, is_chunked, self.sender = _looked_at(sizes)
        lacking = len(sizes) * largest - total
        self.is_direct = dim == 0 and is_chunked and lacking <= _LACKING_SHARE * total
        self.is_even = dim == 0 and not lacking
        self.is_short = shape[dim] < largest
        self.shape = (*shape[:dim], total, *shape[dim + 1 :])
        self.num_outer = math.prod(shape[:dim])
        self.row_bytes = math.prod(shape[dim + 1 :]) * dtype.itemsize
        self.slot_bytes = self.num_outer * largest * self.row_bytes
        self.gathered_bytes = len(sizes) * self.slot_bytes
        self.packed_dtype = dtype if dtype in _COPIED_DTYPES and self.is_even else torch.uint8


class Stage(ABC):
    """What brings some parts one axis further.

    Args:
        parts: The parts.
        axis: The axis.

    Attributes:
        parts: The parts.
        axis: The axis.
        scratch_bytes: Bytes of scratch memory that `run` needs.
    """

    scratch_bytes: int

    def __init__(self, parts: list[Part], axis: Axis) -> None:
        self.parts, self.axis = parts, axis

    def new_output(self, part: Part, block: torch.Tensor) -> torch.Tensor:
        """Allocate what comes out of a part, on the device and in the dtype of a block."""
        return block.new_empty(part.shape)

    @abstractmethod
    def run(self, send: Send, scratch: torch.Tensor) -> None:
        """Fill the outputs. Collective."""


class Send(NamedTuple):
    """A stage with what goes in and comes out this time."""

    stage: Stage
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    group: dist.ProcessGroup


class Direct(Stage):
    """Collectives from where the blocks are to where they belong, sent together.

    They are for large parts of blocks of whole rows, and for those of which one rank has all. Last blocks that are
    shorter are sent out of scratch memory, and received with as much memory behind the output as they lack.
    """

    def __init__(self, parts: list[Part], axis: Axis) -> None:
        super().__init__(parts, axis)
        self.scratch_bytes = sum(part.slot_bytes for part in parts if part.is_short and part.sender is None)

    def new_output(self, part: Part, block: torch.Tensor) -> torch.Tensor:
        """As for every stage, with the memory that lies behind it."""
        if part.sender is not None or part.is_even:
            return super().new_output(part, block)
        return block.new_empty((len(part.sizes) * part.sizes[0], *part.shape[1:]))[: part.shape[0]]

    def run(self, send: Send, scratch: torch.Tensor) -> None:
        """As for every stage."""
        sent = []
        for part, block, output in zip(self.parts, send.inputs, send.outputs, strict=True):
            data = bytes_of(block)
            if part.sender is not None:
                if block.numel():
                    output.copy_(block)
            elif part.is_short:
                padded, scratch = scratch[: part.slot_bytes], scratch[part.slot_bytes :]
                padded[: len(data)] = data
                padded[len(data) :] = 0  # it comes out behind the output, and goes into a file with `torch.save`
                data = padded
            sent.append(data)
        with sent_together(send.group, scratch.device):
            for part, data, output in zip(self.parts, sent, send.outputs, strict=True):
                if part.sender is None:
                    received = output.as_strided((part.gathered_bytes // output.element_size(),), (1,))
                    all_gather_into(received.view(torch.uint8), data, send.group)
                else:
                    dist.broadcast(bytes_of(output), group=send.group, group_src=part.sender)


class Packed(Stage):
    """One collective for parts whose blocks are laid one after the other into scratch memory.

    A few kernels do it for all parts, since to start one takes longer than to copy a small tensor.
    """

    def __init__(self, parts: list[Part], axis: Axis) -> None:
        super().__init__(parts, axis)
        self._num_ranks = len(parts[0].sizes)
        self._dtype = parts[0].packed_dtype
        self._slot_sizes = [part.slot_bytes // self._dtype.itemsize for part in parts]
        self._sent_bytes = sum(part.slot_bytes for part in parts)
        self._received_bytes = self._num_ranks * self._sent_bytes
        self._sends_block = len(parts) == 1 and not parts[0].is_short
        self.scratch_bytes = self._received_bytes + (0 if self._sends_block else self._sent_bytes)

    def run(self, send: Send, scratch: torch.Tensor) -> None:
        """As for every stage."""
        received, sent = scratch[: self._received_bytes], scratch[self._received_bytes : self.scratch_bytes]
        if self._sends_block:
            sent = bytes_of(send.inputs[0])
        elif self._dtype == torch.uint8:
            torch.cat(list(self._filled(map(bytes_of, send.inputs), received)), out=sent)
        else:  # few calls for each tensor: in their dtype they need not be viewed as bytes
            blocks = [block if block.dim() == 1 else block.view(-1) for block in send.inputs]
            torch.cat(blocks, out=sent.view(self._dtype))
        all_gather_into(received, sent, send.group)
        if self.parts[0].is_even:
            self._unpack_even(received, send.outputs)
        else:
            self._unpack(received, send.outputs)

    def _unpack_even(self, received: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        flat = map(bytes_of, outputs) if self._dtype == torch.uint8 else outputs
        rows = [output.view(self._num_ranks, -1) for output in flat]
        slots = received.view(self._dtype).view(self._num_ranks, -1)
        torch.split_with_sizes_copy(slots, self._slot_sizes, dim=1, out=rows)

    def _unpack(self, received: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        slots = received.view(self._num_ranks, self._sent_bytes)
        begin = 0
        for part, output in zip(self.parts, outputs, strict=True):
            own = slots[:, begin : begin + part.slot_bytes]
            runs = [
                slot[: part.num_outer * size * part.row_bytes].view(part.num_outer, size * part.row_bytes)
                for slot, size in zip(own, part.sizes, strict=True)
            ]
            torch.cat(runs, dim=1, out=bytes_of(output).view(part.num_outer, sum(part.sizes) * part.row_bytes))
            begin += part.slot_bytes

    def _filled(self, blocks: Iterable[torch.Tensor], filler: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of this rank's blocks, each as long as the largest of any rank."""
        for part, block in zip(self.parts, blocks, strict=True):
            yield block
            if block.numel() < part.slot_bytes:
                yield filler[: part.slot_bytes - block.numel()]


def stages(parts: Sequence[Part], axis: Axis, device_type: str) -> Iterator[Stage]:
    """Send large parts of rows from where they are, small ones and columns through scratch memory.

    Args:
        parts: What is gathered along an axis.
        axis: The axis.
        device_type: That of the device where it is.
    """
    small_bytes = _SMALL_BYTES_ON_CPU if device_type == "cpu" else _SMALL_BYTES
    large = [part for part in parts if part.gathered_bytes >= small_bytes]
    direct = [part for part in large if part.is_direct or part.sender is not None]
    if direct:
        yield Direct(direct, axis)
    for part in large:
        if not part.is_direct and part.sender is None:
            yield Packed([part], axis)
    small: dict[tuple[bool, torch.dtype], list[Part]] = {}
    for part in parts:
        if part.gathered_bytes < small_bytes:
            small.setdefault((part.is_even, part.packed_dtype), []).append(part)
    for alike in small.values():
        for batch in _batches(alike):
            yield Packed(batch, axis)


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    room = _BATCH_BYTES
    for part in parts:
        if batch and part.gathered_bytes > room:
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append(part)
        room -= part.gathered_bytes
    if batch:
        yield batch


@functools.lru_cache(maxsize=4096)
def _looked_at(sizes: tuple[int, ...]) -> tuple[int, int, bool, int | None]:
    """Return the sum of sizes, the largest, whether `torch.chunk` cuts so, and where the only one is that is not 0."""
    total, largest = sum(sizes), max(sizes)
    is_chunked = all(size == min(max(total - largest * i, 0), largest) for i, size in enumerate(sizes))
    return total, largest, is_chunked, sizes.index(total) if largest == total > 0 else None
