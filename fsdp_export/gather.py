"""Blocks of a bucket of tensors on every rank -> the tensors on every rank, mesh axis by mesh axis.

The cuts of a sharding are undone last to first. Undoing one is an all-gather inside its mesh axis: the blocks of the
ranks along it lie side by side in the cut's dim, so replicas and other axes move nothing. Bytes are moved, not values:
gloo knows no fp8 and no unsigned types. All memory is allocated before anything is sent, so that a rank that runs out
of it fails before the others wait for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
_ALIGNMENT = 16


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
        self._stages: list[_Stage] = []
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
        """Send large parts each by itself, small ones together."""
        batches = [[part] for part in parts if part.slot_bytes >= _SMALL_BYTES]
        room = 0
        for part in parts:
            if 0 < part.slot_bytes < _SMALL_BYTES:
                if part.slot_bytes > room:
                    batches.append([])
                    room = _SMALL_BYTES
                batches[-1].append(part)
                room -= part.slot_bytes
        self._stages += [_Stage(batch, group) for batch in batches]
        for part in parts:
            self.outputs[part.index] = part.output


class _Part:
    """One tensor on its way through one all-gather: `tensor` is one of the blocks, which have `sizes` along `dim`."""

    def __init__(self, index: int, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
        self.index, self.tensor, self.dim, self.sizes = index, tensor, dim, sizes
        self.output = tensor.new_empty(self.shape(sum(sizes)))

    @property
    def slot_bytes(self) -> int:
        """Bytes that every rank sends: those of the largest block."""
        return math.prod(self.byte_shape(max(self.sizes)))

    def shape(self, size: int) -> list[int]:
        """Return the shape of a block with this size along `dim`."""
        shape = list(self.tensor.shape)
        shape[self.dim] = size
        return shape

    def byte_shape(self, size: int) -> list[int]:
        """Return the same shape in bytes, which are counted in the last dim."""
        *outer, last = self.shape(size)
        return [*outer, last * self.tensor.element_size()]


class _Stage:
    """One collective inside one mesh axis.

    Equal blocks of whole rows are gathered to where they belong, and a large block that one rank alone has is sent from
    there; others go through scratch memory, which the stages of a bucket share.
    """

    def __init__(self, parts: list[_Part], group: dist.ProcessGroup) -> None:
        self._parts, self._group = parts, group
        first = parts[0]
        holders = [position for position, size in enumerate(first.sizes) if size]
        self._sender = holders[0] if len(parts) == len(holders) == 1 and first.slot_bytes >= _SMALL_BYTES else None
        self._is_direct = len(parts) == 1 and first.dim == 0 and min(first.sizes) == max(first.sizes)
        self._begins = [0, *accumulate(-(-part.slot_bytes // _ALIGNMENT) * _ALIGNMENT for part in parts)]
        needs_none = self._is_direct or self._sender is not None
        self.scratch_bytes = 0 if needs_none else (1 + len(first.sizes)) * self._begins[-1]

    def run(self, scratch: torch.Tensor) -> None:
        if self._is_direct:
            all_gather_into(bytes_of(self._parts[0].output), bytes_of(self._parts[0].tensor), self._group)
            return
        if self._sender is not None:
            output = self._parts[0].output
            if self._parts[0].tensor.numel():
                output.copy_(self._parts[0].tensor)
            dist.broadcast(bytes_of(output), group=self._group, group_src=self._sender)
            return
        sent, slots = scratch[: self._begins[-1]], scratch[self._begins[-1] : self.scratch_bytes]
        for part, begin in zip(self._parts, self._begins, strict=False):
            own = bytes_of(part.tensor)
            sent[begin : begin + own.numel()].copy_(own)
        all_gather_into(slots, sent, self._group)
        for part, begin in zip(self._parts, self._begins, strict=False):
            shapes = [part.byte_shape(size) for size in part.sizes]
            blocks = [
                slot[begin : begin + math.prod(shape)].view(shape)
                for slot, shape in zip(slots.view(len(shapes), -1), shapes, strict=True)
            ]
            torch.cat(blocks, dim=part.dim, out=part.output.view(torch.uint8))


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
