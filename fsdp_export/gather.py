"""Blocks of a bucket of tensors on every rank -> the tensors on every rank, mesh axis by mesh axis.

The cuts of a sharding are undone last to first. Undoing one is an all-gather inside its mesh axis: the blocks of the
ranks along it lie side by side in the cut's dim, so replicas and other axes move nothing. All memory is allocated
before anything is sent, so that a rank that runs out of it fails before the others wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Axis, Part, Send, Stage, stages
from .spec import Sharding, TensorSpec
from .steps import Rows

__all__ = ["Axis", "Gather", "GatherPlan", "Groups", "Slice"]

Groups = Mapping[Axis, dist.ProcessGroup]
"""The process group along an axis of a mesh."""


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
        device_type: That of the device where they are gathered.

    Attributes:
        slices: The slices.
        held: For every slice the rows that this rank brings a block of.
    """

    def __init__(self, slices: Sequence[Slice], rank: int, device_type: str) -> None:
        self.slices = tuple(slices)
        self.held = tuple(each.held(rank) for each in slices)
        self._are_empty = [each.is_empty for each in slices]
        self._stages: list[Stage] = []
        shapes = [self._block_shape(index, rank) for index in range(len(slices))]
        for round_ in range(max((len(each.spec.sharding.cuts) for each in slices), default=0)):
            parts: dict[Axis, list[Part]] = {}
            for index, each in enumerate(slices):
                mesh, cuts = each.spec.sharding.mesh, each.spec.sharding.cuts
                cut = len(cuts) - 1 - round_
                if cut >= 0 and not each.is_empty and mesh.shape[cuts[cut][1]] > 1:
                    sizes = _sizes_along(each.spec.sharding, each.spec.shape, each.rows, cut, rank)
                    part = Part(index, shapes[index], cuts[cut][0], sizes, each.dtype)
                    shapes[index] = part.shape
                    parts.setdefault((mesh, cuts[cut][1]), []).append(part)
            for axis, along_axis in parts.items():
                self._stages += stages(along_axis, axis, device_type)
        self._scratch_bytes = max((stage.scratch_bytes for stage in self._stages), default=0)
        last = {part.index: (part, stage) for stage in self._stages for part in stage.parts}
        self._last = tuple(last.values())
        self._uncut = tuple(index for index, each in enumerate(slices) if index not in last and not each.is_empty)

    def begin(
        self,
        blocks: Sequence[torch.Tensor],
        groups: Groups,
        beside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Gather:
        """Allocate what a gather needs. Local.

        Args:
            blocks: This rank's block of every slice, contiguous, in its dtype, on the device of the groups.
            groups: Process groups of all mesh axes with more than one rank.
            beside: Enters the stream on which `launch` will be called. Only what comes out belongs to the current one.
        """
        outputs = [
            block.new_empty((_num_rows(each.rows), *each.spec.shape[1:])) if is_empty else block
            for each, is_empty, block in zip(self.slices, self._are_empty, blocks, strict=True)
        ]
        last = {part: stage.new_output(part, blocks[part.index]) for part, stage in self._last}
        sends = []
        with beside():
            for stage in self._stages:
                inputs = [outputs[part.index] for part in stage.parts]
                for part in stage.parts:
                    own = last.get(part)
                    outputs[part.index] = own if own is not None else stage.new_output(part, outputs[part.index])
                sends.append(Send(stage, inputs, [outputs[part.index] for part in stage.parts], groups[stage.axis]))
            device = blocks[0].device if blocks else None
            scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=device)
        return Gather(outputs, [blocks[index] for index in self._uncut], sends, scratch)

    def _block_shape(self, index: int, rank: int) -> tuple[int, ...]:
        spec = self.slices[index].spec
        shape = spec.sharding.box(spec.shape, rank).shape
        return (_num_rows(self.held[index]), *shape[1:]) if shape else shape


class Gather:
    """The gather of one bucket, with all its memory: made by `GatherPlan.begin`, sent by `launch`.

    Attributes:
        outputs: For every slice its rows, one after the other, contiguous, on the device and in the dtype of the
            block; the block itself where nothing is cut. Filled by `launch`.
        uncut: Those that are blocks.
    """

    def __init__(
        self, outputs: list[torch.Tensor], uncut: list[torch.Tensor], sends: list[Send], scratch: torch.Tensor
    ) -> None:
        self.outputs, self.uncut, self._sends, self._scratch = outputs, uncut, sends, scratch

    def launch(self) -> None:
        """Send. Collective: every rank of the mesh must call this in the same order.

        On a CUDA device the work is queued on the current stream, and this returns at once.
        """
        for send in self._sends:
            send.stage.run(send, self._scratch)
        self._sends.clear()
        del self._scratch


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
