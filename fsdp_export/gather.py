"""Blocks of a bucket of tensors on every rank -> the tensors on every rank, mesh axis by mesh axis.

The cuts of a sharding are undone last to first. Undoing one is an all-gather inside its mesh axis: the blocks of the
ranks along it lie side by side in the cut's dim, so replicas and other axes move nothing. Bytes are moved, not values:
gloo knows no fp8 and no unsigned types. All memory is allocated before anything is sent, so that a rank that runs out
of it fails before the others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from .compat import all_gather_into
from .plan import Rows
from .spec import Mesh, Sharding, TensorSpec

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

    def sizes_along(self, cut: int, rank: int) -> list[int]:
        """Return the sizes, in the dim of a cut, of the blocks that the ranks along its axis hold."""
        sharding, shape = self.spec.sharding, self.spec.shape
        dim, axis = sharding.cuts[cut]
        partial = Sharding(sharding.mesh, sharding.cuts[: cut + 1])
        coordinate = list(sharding.mesh.coordinate(rank))
        sizes = []
        for position in range(sharding.mesh.shape[axis]):
            coordinate[axis] = position
            box = partial.box_at(shape, coordinate)
            sizes.append(self._num_rows_in(box.rows) if dim == 0 else box.shape[dim])
        return sizes

    def empty(self) -> torch.Tensor:
        """Return the gathered rows of a tensor without bytes."""
        num_rows = sum(stop - first for first, stop in self.rows)
        return self.local.new_empty((num_rows, *self.spec.shape[1:]))

    def _num_rows_in(self, span: Rows) -> int:
        return sum(max(min(stop, span[1]) - max(first, span[0]), 0) for first, stop in self.rows)


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

    def launch(self) -> None:
        """Send. Collective: every rank of the mesh must call this in the same order.

        On a CUDA device the work is queued on the current stream, and this returns at once.
        """
        for stage in self._stages:
            stage.run()
        self._stages.clear()

    def _add_stages(self, parts: list[_Part], group: dist.ProcessGroup) -> None:
        """Send large parts each by itself, small ones through one bucket."""
        small = [part for part in parts if part.slot_bytes < _SMALL_BYTES]
        batches = [[part] for part in parts if part.slot_bytes >= _SMALL_BYTES]
        for batch in [*batches, small] if small else batches:
            stage = _Stage(batch, group)
            self._stages.append(stage)
            for part, output in zip(batch, stage.outputs, strict=True):
                self.outputs[part.index] = output


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor on its way through one all-gather: `tensor` is one of the blocks, which have `sizes` along `dim`."""

    index: int
    tensor: torch.Tensor
    dim: int
    sizes: list[int]

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
    """One all-gather inside one mesh axis."""

    def __init__(self, parts: list[_Part], group: dist.ProcessGroup) -> None:
        self._parts, self._group = parts, group
        first = parts[0]
        self._is_direct = len(parts) == 1 and first.dim == 0 and min(first.sizes) == max(first.sizes)
        device = first.tensor.device
        self.outputs = [part.tensor.new_empty(part.shape(sum(part.sizes))) for part in parts]
        if self._is_direct:
            self._slots, self._sent = _as_bytes(self.outputs[0]), _as_bytes(first.tensor)
            return
        self._begins = [0, *accumulate(-(-part.slot_bytes // _ALIGNMENT) * _ALIGNMENT for part in parts)]
        self._sent = torch.empty(self._begins[-1], dtype=torch.uint8, device=device)
        self._slots = torch.empty((len(first.sizes), self._begins[-1]), dtype=torch.uint8, device=device)

    def run(self) -> None:
        if self._is_direct:
            all_gather_into(self._slots, self._sent, self._group)
            return
        for part, begin in zip(self._parts, self._begins, strict=False):
            own = _as_bytes(part.tensor)
            self._sent[begin : begin + own.numel()].copy_(own)
        all_gather_into(self._slots.view(-1), self._sent, self._group)
        for part, begin, output in zip(self._parts, self._begins, self.outputs, strict=False):
            shapes = [part.byte_shape(size) for size in part.sizes]
            blocks = [
                slot[begin : begin + math.prod(shape)].view(shape)
                for slot, shape in zip(self._slots, shapes, strict=True)
            ]
            torch.cat(blocks, dim=part.dim, out=output.view(torch.uint8))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a row of bytes."""
    return tensor.reshape(-1).view(torch.uint8)
