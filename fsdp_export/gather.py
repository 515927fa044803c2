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

import torch
import torch.distributed as dist

from .compat import all_gather_into
from .memory import bytes_of
from .spec import Mesh, Sharding, TensorSpec
from .steps import Rows

__all__ = ["Block", "Gather", "Groups"]

Groups = Mapping[tuple[Mesh, int], dist.ProcessGroup]
"""The process group along an axis of a mesh."""

# Below this many bytes a collective costs more than the copies in and out of a shared one (measured, NVLink and gloo).
_SMALL_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of the rows that are gathered of one tensor.

    Attributes:
        spec: The tensor.
        rows: Disjoint ascending ranges of its rows; they are gathered as if they were all of it.
        local: This rank's block of those rows, contiguous, in the dtype to gather, on the device of the groups.
    """

    spec: TensorSpec
    rows: tuple[Rows, ...]
    local: torch.Tensor

    def sizes_along(self, cut: int, rank: int) -> tuple[int, ...]:
        """Return the sizes, in the dim of a cut, of the blocks that the ranks along its axis hold."""
        return _sizes_along(self.spec.sharding, self.spec.shape, self.rows, cut, rank)

    def empty(self) -> torch.Tensor:
        """Return the gathered rows of a tensor without bytes."""
        num_rows = sum(stop - first for first, stop in self.rows)
        return self.local.new_empty((num_rows, *self.spec.shape[1:]))


class Gather:
    """The gather of one bucket: allocated here, sent by `launch`.

    Args:
        blocks: This rank's blocks. Every rank of the mesh gathers the same rows of the same tensors.
        groups: Process groups of all mesh axes with more than one rank.
        rank: This process's global rank.

    Attributes:
        outputs: For every block the gathered rows, one after the other, contiguous, on the device and in the dtype of
            the block; the block itself where nothing is cut. Filled by `launch`.
    """

    def __init__(self, blocks: Sequence[Block], groups: Groups, rank: int) -> None:
        self.outputs = [block.local if block.spec.num_bytes else block.empty() for block in blocks]
        self._stages: list[_Single | _Packed] = []
        for round_ in range(max((len(block.spec.sharding.cuts) for block in blocks), default=0)):
            parts: dict[tuple[Mesh, int], list[_Part]] = {}
            for index, block in enumerate(blocks):
                mesh, cuts = block.spec.sharding.mesh, block.spec.sharding.cuts
                cut = len(cuts) - 1 - round_
                if cut >= 0 and block.spec.num_bytes and mesh.shape[cuts[cut][1]] > 1:
                    part = _Part(index, self.outputs[index], cuts[cut][0], block.sizes_along(cut, rank))
                    parts.setdefault((mesh, cuts[cut][1]), []).append(part)
            for key, along_axis in parts.items():
                self._add_stages(along_axis, groups[key])
        num_bytes = max((stage.scratch_bytes for stage in self._stages), default=0)
        device = blocks[0].local.device if blocks else None
        self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def launch(self) -> None:
        """Send. Collective: every rank of the mesh must call this in the same order.

        On a CUDA device the work is queued on the current stream, and this returns at once.
        """
        for stage in self._stages:
            stage.run(self._scratch)
        self._stages.clear()
        del self._scratch

    def _add_stages(self, parts: list[_Part], group: dist.ProcessGroup) -> None:
        """Send large parts each by itself, small ones together; those of equal blocks of whole rows apart."""
        for part in parts:
            if part.slot_bytes >= _SMALL_BYTES:
                self._stages.append(_Single(part, group))
        for is_even in (True, False):
            small = [part for part in parts if part.is_even == is_even and 0 < part.slot_bytes < _SMALL_BYTES]
            self._stages += [_Packed(batch, group) for batch in _batches(small)]
        for part in parts:
            self.outputs[part.index] = part.output


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    room = _SMALL_BYTES
    for part in parts:
        if part.slot_bytes > room:
            yield batch
            batch, room = [], _SMALL_BYTES
        batch.append(part)
        room -= part.slot_bytes
    if batch:
        yield batch


class _Part:
    """One tensor on its way through one all-gather.

    Attributes:
        index: Its place in the bucket.
        tensor: This rank's block.
        sizes: Sizes of the blocks of all ranks in the dim that is gathered.
        output: The blocks of all ranks, side by side in that dim.
        is_even: Whether all blocks are equal and their bytes lie one after the other in the output.
        num_outer: How many runs of bytes a block has: the product of the dims before the one that is gathered.
        row_bytes: Bytes of such a run for each of `sizes`.
        slot_bytes: Bytes that every rank sends: those of the largest block.
    """

    def __init__(self, index: int, tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> None:
        shape = tensor.shape
        self.index, self.tensor, self.sizes = index, tensor, sizes
        self.output = tensor.new_empty((*shape[:dim], sum(sizes), *shape[dim + 1 :]))
        largest = max(sizes)
        self.is_even = dim == 0 and min(sizes) == largest
        self.num_outer = math.prod(shape[:dim])
        self.row_bytes = math.prod(shape[dim + 1 :]) * tensor.element_size()
        self.slot_bytes = self.num_outer * largest * self.row_bytes


class _Single:
    """One collective for one large part.

    Equal blocks of whole rows are gathered to where they belong, and a block that one rank alone has is sent from
    there; others go through scratch memory.
    """

    def __init__(self, part: _Part, group: dist.ProcessGroup) -> None:
        holders = [position for position, size in enumerate(part.sizes) if size]
        self._part, self._group = part, group
        self._sender = holders[0] if len(holders) == 1 else None
        self._packed = None if part.is_even or self._sender is not None else _Packed([part], group)
        self.scratch_bytes = self._packed.scratch_bytes if self._packed is not None else 0

    def run(self, scratch: torch.Tensor) -> None:
        part = self._part
        if self._packed is not None:
            self._packed.run(scratch)
        elif self._sender is None:
            all_gather_into(bytes_of(part.output), bytes_of(part.tensor), self._group)
        else:
            if part.tensor.numel():
                part.output.copy_(part.tensor)
            dist.broadcast(bytes_of(part.output), group=self._group, group_src=self._sender)


class _Packed:
    """One collective for parts whose blocks are laid one after the other into scratch memory.

    A few kernels do it for all parts, since to start one takes longer than to copy a small tensor.
    """

    def __init__(self, parts: list[_Part], group: dist.ProcessGroup) -> None:
        self._parts, self._group = parts, group
        self._num_ranks = len(parts[0].sizes)
        self._sent_bytes = sum(part.slot_bytes for part in parts)
        self.scratch_bytes = (1 + self._num_ranks) * self._sent_bytes

    def run(self, scratch: torch.Tensor) -> None:
        sent, received = scratch[: self._sent_bytes], scratch[self._sent_bytes : self.scratch_bytes]
        torch.cat(list(self._blocks(received)), out=sent)
        all_gather_into(received, sent, self._group)
        slots = received.view(self._num_ranks, self._sent_bytes)
        if self._parts[0].is_even:
            outputs = [bytes_of(part.output).view(self._num_ranks, part.slot_bytes) for part in self._parts]
            torch.split_with_sizes_copy(slots, [part.slot_bytes for part in self._parts], dim=1, out=outputs)
            return
        begin = 0
        for part in self._parts:
            own = slots[:, begin : begin + part.slot_bytes]
            blocks = [
                slot[: part.num_outer * size * part.row_bytes].view(part.num_outer, size * part.row_bytes)
                for slot, size in zip(own, part.sizes, strict=True)
            ]
            output = bytes_of(part.output).view(part.num_outer, sum(part.sizes) * part.row_bytes)
            torch.cat(blocks, dim=1, out=output)
            begin += part.slot_bytes

    def _blocks(self, filler: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of this rank's blocks, each as long as the largest of any rank."""
        for part in self._parts:
            block = bytes_of(part.tensor)
            yield block
            if block.numel() < part.slot_bytes:
                yield filler[: part.slot_bytes - block.numel()]


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


def _num_rows_in(rows: Sequence[Rows], span: Rows) -> int:
    return sum(max(min(stop, span[1]) - max(first, span[0]), 0) for first, stop in rows)
