"""Blocks of a bucket of tensors on every rank -> the tensors on every rank, mesh axis by mesh axis.

The cuts of a sharding are undone last to first. Undoing one is an all-gather inside its mesh axis: the blocks of the
ranks along it lie side by side in the cut's dim, so replicas and other axes move nothing. Bytes are moved, not values:
gloo knows no fp8 and no unsigned types. All memory is allocated before anything is sent, so that a rank that runs out
of it fails before the others wait for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from .compat import all_gather_into, sent_together
from .memory import bytes_of
from .spec import Mesh, Sharding, TensorSpec
from .steps import Rows

__all__ = ["Axis", "Gather", "GatherPlan", "Groups", "Slice"]

Axis = tuple[Mesh, int]
"""An axis of a mesh."""
Groups = Mapping[Axis, dist.ProcessGroup]
"""The process group along an axis of a mesh."""

# Below this many gathered bytes a collective costs more than the copies in and out of a shared one (measured, NVLink).
_SMALL_BYTES = 32 << 20
_BATCH_BYTES = 128 << 20
# Copied as they are; what else there is (fp8, unsigned types) as bytes.
_COPIED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})


@dataclass(frozen=True, slots=True)
class Slice:
    """What is gathered of one tensor.

    Attributes:
        spec: The tensor.
        rows: Disjoint ascending ranges of its rows; they are gathered as if they were all of it.
        dtype: The dtype in which it is gathered.
    """

    spec: TensorSpec
    rows: tuple[Rows, ...]
    dtype: torch.dtype

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to gather."""
        return not self.spec.num_bytes or not _num_rows(self.rows)

    def held(self, rank: int) -> tuple[Rows, ...]:
        """Return which of the rows a rank has a block of; one range without rows if it has none."""
        first, stop = self.spec.sharding.box(self.spec.shape, rank).rows
        held = ((max(low, first), min(high, stop)) for low, high in self.rows)
        return tuple(rows for rows in held if rows[0] < rows[1]) or ((first, first),)


class GatherPlan:
    """How slices come from all ranks to all ranks: made once, and used for every gather of these slices.

    Args:
        slices: Every rank of the mesh gathers the same.
        rank: This process's global rank.

    Attributes:
        slices: The slices.
        held: For every slice the rows that this rank brings a block of.
    """

    def __init__(self, slices: Sequence[Slice], rank: int) -> None:
        self.slices = tuple(slices)
        self.held = tuple(each.held(rank) for each in slices)
        self._are_empty = [each.is_empty for each in slices]
        self._stages: list[_Stage] = []
        shapes = [self._block_shape(index, rank) for index in range(len(slices))]
        for round_ in range(max((len(each.spec.sharding.cuts) for each in slices), default=0)):
            parts: dict[Axis, list[_Part]] = {}
            for index, each in enumerate(slices):
                mesh, cuts = each.spec.sharding.mesh, each.spec.sharding.cuts
                cut = len(cuts) - 1 - round_
                if cut >= 0 and not each.is_empty and mesh.shape[cuts[cut][1]] > 1:
                    sizes = _sizes_along(each.spec.sharding, each.spec.shape, each.rows, cut, rank)
                    part = _Part(index, shapes[index], cuts[cut][0], sizes, each.dtype)
                    shapes[index] = part.shape
                    parts.setdefault((mesh, cuts[cut][1]), []).append(part)
            for axis, along_axis in parts.items():
                self._stages += _stages(along_axis, axis)
        self._scratch_bytes = max((stage.scratch_bytes for stage in self._stages), default=0)

    def begin(self, blocks: Sequence[torch.Tensor], groups: Groups) -> Gather:
        """Allocate what a gather needs. Local.

        Args:
            blocks: This rank's block of every slice, contiguous, in its dtype, on the device of the groups.
            groups: Process groups of all mesh axes with more than one rank.
        """
        outputs = [
            block.new_empty((_num_rows(each.rows), *each.spec.shape[1:])) if is_empty else block
            for each, is_empty, block in zip(self.slices, self._are_empty, blocks, strict=True)
        ]
        sends = []
        for stage in self._stages:
            inputs = [outputs[part.index] for part in stage.parts]
            for part in stage.parts:
                outputs[part.index] = outputs[part.index].new_empty(part.shape)
            sends.append(_Send(stage, inputs, [outputs[part.index] for part in stage.parts], groups[stage.axis]))
        device = blocks[0].device if blocks else None
        return Gather(outputs, sends, torch.empty(self._scratch_bytes, dtype=torch.uint8, device=device))

    def _block_shape(self, index: int, rank: int) -> tuple[int, ...]:
        spec = self.slices[index].spec
        shape = spec.sharding.box(spec.shape, rank).shape
        return (_num_rows(self.held[index]), *shape[1:]) if shape else shape


class Gather:
    """The gather of one bucket, with all its memory: made by `GatherPlan.begin`, sent by `launch`.

    Attributes:
        outputs: For every slice its rows, one after the other, contiguous, on the device and in the dtype of the
            block; the block itself where nothing is cut. Filled by `launch`.
    """

    def __init__(self, outputs: list[torch.Tensor], sends: list[_Send], scratch: torch.Tensor) -> None:
        self.outputs, self._sends, self._scratch = outputs, sends, scratch

    def launch(self) -> None:
        """Send. Collective: every rank of the mesh must call this in the same order.

        On a CUDA device the work is queued on the current stream, and this returns at once.
        """
        for send in self._sends:
            send.stage.run(send, self._scratch)
        self._sends.clear()
        del self._scratch


class _Part:
    """One tensor on its way through one all-gather.

    Attributes:
        index: Its place in the bucket.
        sizes: Sizes of the blocks of all ranks in the dim that is gathered.
        shape: Shape of what comes out: the blocks of all ranks, side by side in that dim.
        is_even: Whether all blocks are equal and their bytes lie one after the other in what comes out.
        num_outer: How many runs of bytes a block has: the product of the dims before the one that is gathered.
        row_bytes: Bytes of such a run for each of `sizes`.
        slot_bytes: Bytes that every rank sends: those of the largest block.
        gathered_bytes: Those of all ranks.
        sender: The only rank along the axis with a block, if there is but one.
        packed_dtype: The dtype in which it is copied to and from scratch memory.
    """

    __slots__ = (
        *("gathered_bytes", "index", "is_even", "num_outer", "packed_dtype"),
        *("row_bytes", "sender", "shape", "sizes", "slot_bytes"),
    )

    def __init__(
        self, index: int, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.index, self.sizes = index, sizes
        self.shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
        largest = max(sizes)
        self.is_even = dim == 0 and min(sizes) == largest
        self.num_outer = math.prod(shape[:dim])
        self.row_bytes = math.prod(shape[dim + 1 :]) * dtype.itemsize
        self.slot_bytes = self.num_outer * largest * self.row_bytes
        self.gathered_bytes = len(sizes) * self.slot_bytes
        holders = [position for position, size in enumerate(sizes) if size]
        self.sender = holders[0] if len(holders) == 1 else None
        self.packed_dtype = dtype if dtype in _COPIED_DTYPES and self.is_even else torch.uint8


class _Direct:
    """Collectives from where the blocks are to where they belong, sent together.

    They are for large parts of equal blocks of whole rows, and for those of which one rank has all.
    """

    scratch_bytes = 0

    def __init__(self, parts: list[_Part], axis: Axis) -> None:
        self.parts, self.axis = parts, axis

    def run(self, send: _Send, scratch: torch.Tensor) -> None:
        tensors = list(zip(self.parts, send.inputs, send.outputs, strict=True))
        for part, block, output in tensors:
            if part.sender is not None and block.numel():
                output.copy_(block)
        with sent_together(send.group, scratch.device):
            for part, block, output in tensors:
                if part.sender is None:
                    all_gather_into(bytes_of(output), bytes_of(block), send.group)
                else:
                    dist.broadcast(bytes_of(output), group=send.group, group_src=part.sender)


class _Packed:
    """One collective for parts whose blocks are laid one after the other into scratch memory.

    A few kernels do it for all parts, since to start one takes longer than to copy a small tensor.
    """

    def __init__(self, parts: list[_Part], axis: Axis) -> None:
        self.parts, self.axis = parts, axis
        self._num_ranks = len(parts[0].sizes)
        self._slots = [part.slot_bytes for part in parts]
        self._sent_bytes = sum(self._slots)
        self.scratch_bytes = (1 + self._num_ranks) * self._sent_bytes

    def run(self, send: _Send, scratch: torch.Tensor) -> None:
        sent, received = scratch[: self._sent_bytes], scratch[self._sent_bytes : self.scratch_bytes]
        if self.parts[0].is_even:
            self._run_even(send, sent, received)
            return
        torch.cat(list(self._filled(map(bytes_of, send.inputs), received)), out=sent)
        all_gather_into(received, sent, send.group)
        slots = received.view(self._num_ranks, self._sent_bytes)
        begin = 0
        for part, output in zip(self.parts, send.outputs, strict=True):
            own = slots[:, begin : begin + part.slot_bytes]
            runs = [
                slot[: part.num_outer * size * part.row_bytes].view(part.num_outer, size * part.row_bytes)
                for slot, size in zip(own, part.sizes, strict=True)
            ]
            torch.cat(runs, dim=1, out=bytes_of(output).view(part.num_outer, sum(part.sizes) * part.row_bytes))
            begin += part.slot_bytes

    def _run_even(self, send: _Send, sent: torch.Tensor, received: torch.Tensor) -> None:
        """As `run`, with few calls for each tensor: in their dtype they need not be viewed as bytes."""
        dtype, inputs, outputs = self.parts[0].packed_dtype, send.inputs, send.outputs
        if dtype == torch.uint8:
            inputs, outputs = list(map(bytes_of, inputs)), list(map(bytes_of, outputs))
        torch.cat([block.view(-1) for block in inputs], out=sent.view(dtype))
        all_gather_into(received, sent, send.group)
        slots = received.view(dtype).view(self._num_ranks, -1)
        rows = [output.view(self._num_ranks, -1) for output in outputs]
        torch.split_with_sizes_copy(slots, [size // dtype.itemsize for size in self._slots], dim=1, out=rows)

    def _filled(self, blocks: Iterable[torch.Tensor], filler: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of this rank's blocks, each as long as the largest of any rank."""
        for part, block in zip(self.parts, blocks, strict=True):
            yield block
            if block.numel() < part.slot_bytes:
                yield filler[: part.slot_bytes - block.numel()]


_Stage = _Direct | _Packed


class _Send(NamedTuple):
    """A stage with what goes in and comes out this time."""

    stage: _Stage
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    group: dist.ProcessGroup


def _stages(parts: Sequence[_Part], axis: Axis) -> Iterator[_Stage]:
    """Send large parts from where they are, small and uneven ones through scratch memory."""
    large = [part for part in parts if part.gathered_bytes >= _SMALL_BYTES]
    direct = [part for part in large if part.is_even or part.sender is not None]
    if direct:
        yield _Direct(direct, axis)
    for part in large:
        if not part.is_even and part.sender is None:
            yield _Packed([part], axis)
    small: dict[tuple[bool, torch.dtype], list[_Part]] = {}
    for part in parts:
        if part.gathered_bytes < _SMALL_BYTES:
            small.setdefault((part.is_even, part.packed_dtype), []).append(part)
    for alike in small.values():
        for batch in _batches(alike):
            yield _Packed(batch, axis)


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
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
def _sizes_along(
    sharding: Sharding, shape: tuple[int, ...], rows: tuple[Rows, ...], cut: int, rank: int
) -> tuple[int, ...]:
    dim, axis = sharding.cuts[cut]
    partial = Sharding(sharding.mesh, sharding.cuts[: cut + 1])
    coordinate = list(sharding.mesh.coordinate(rank))
    sizes = []
    for position in range(sharding.mesh.shape[axis]):
        coordinate[axis] = position
        box = partial.box_at(shape, coordinate)
        sizes.append(_num_rows_in(rows, box.rows) if dim == 0 else box.shape[dim])
    return tuple(sizes)


def _num_rows(rows: Iterable[Rows]) -> int:
    return sum(stop - first for first, stop in rows)


def _num_rows_in(rows: Sequence[Rows], span: Rows) -> int:
    return sum(max(min(stop, span[1]) - max(first, span[0]), 0) for first, stop in rows)
