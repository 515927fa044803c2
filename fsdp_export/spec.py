"""Which rows and columns of a tensor lie where: the one description that gather, rows, disk chunks and load use.

A tensor dim that several mesh axes shard is cut axis by axis, each time as `torch.chunk` cuts: into pieces of
`ceil(size / parts)`, the last ones shorter or empty. The only freedom is the order of the axes; DTensor states it in
the `split_factor` of `_StridedShard`. In that order every shard is one contiguous range per dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import lt
from typing import Any

import torch

from .errors import SourceError

__all__ = ["Box", "Mesh", "Sharding", "TensorInfo", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: from `start` to before `stop` in every dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of the box in every dim."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def rows(self) -> tuple[int, int]:
        """First row and the row after the last; a 0-dim tensor is one row."""
        return (self.start[0], self.stop[0]) if self.start else (0, 1)

    def overlap(self, other: Box) -> Box | None:
        """Return the block that both have; None where that has no element."""
        start, stop = tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return where the box is in a block that begins at `origin`."""
        return tuple(
            slice(start - begin, stop - begin) for start, stop, begin in zip(self.start, self.stop, origin, strict=True)
        )

    def of_rows(self, first: int, stop: int) -> Box:
        """Return the part of the box in rows `first` to before `stop`; all of a 0-dim one."""
        if not self.start:
            return self
        return Box((max(first, self.start[0]), *self.start[1:]), (min(stop, self.stop[0]), *self.stop[1:]))

    def has_full_rows(self, shape: Sequence[int]) -> bool:
        """Tell whether the box covers every dim but the first, so that its rows are rows of the tensor."""
        return self.start[1:] == (0,) * len(self.start[1:]) and self.stop[1:] == tuple(shape[1:])


@dataclass(frozen=True, slots=True)
class Mesh:
    """The global ranks of a device mesh in row-major order, and the size of each axis."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.ranks, self.shape)))

    def __hash__(self) -> int:
        return self._hash  # asked for several times for each of 100,000 tensors, on thousands of ranks

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return where on the mesh a global rank stands."""
        return _coordinate(self, rank)

    def along(self, axes: Sequence[int], rank: int) -> Mesh:
        """Return the part of the mesh that a global rank shares with those that differ from it in these axes only."""
        own = self.coordinate(rank)
        coordinates = product(*(range(size) if axis in axes else (own[axis],) for axis, size in enumerate(self.shape)))
        places = dict(zip(product(*map(range, self.shape)), self.ranks, strict=True))
        return Mesh(tuple(places[at] for at in coordinates), tuple(self.shape[axis] for axis in axes))

    def ascending(self) -> Mesh | None:
        """Return the mesh with its ranks ascending along every axis; None where they are not in one order everywhere.

        torch numbers the ranks of a process group in ascending order, whatever the mesh says, and a shard lies where
        the group says: on a mesh [1, 0], FSDP2 gives the first rows to rank 0.
        """
        ranks = torch.tensor(self.ranks, device="cpu").view(self.shape)
        for axis, size in enumerate(self.shape):
            order = ranks.movedim(axis, 0).reshape(size, -1).argsort(0)
            if (order != order[:, :1]).any():
                return None
            ranks = ranks.sort(axis).values
        return Mesh(tuple(ranks.flatten().tolist()), self.shape)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor lies on a mesh.

    Attributes:
        mesh: The ranks. Axes that no cut names hold replicas.
        cuts: Pairs (dim, mesh axis) in the order in which the tensor is cut.
        is_replicated: Whether every rank holds the whole tensor.
    """

    mesh: Mesh
    cuts: tuple[tuple[int, int], ...] = ()
    is_replicated: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_replicated", all(self.mesh.shape[axis] == 1 for _, axis in self.cuts))

    @classmethod
    def replicated(cls, ranks: Sequence[int]) -> Sharding:
        """Return the sharding of a tensor that every one of these ranks holds whole."""
        return cls(Mesh(tuple(ranks), (len(ranks),)))

    @classmethod
    def from_placements(cls, mesh: Mesh, placements: Sequence[Any], name: str) -> Sharding:
        """Read the placements of a DTensor.

        Args:
            mesh: The DTensor's mesh.
            placements: One `torch.distributed.tensor` placement per mesh axis.
            name: The tensor, for messages.

        Raises:
            SourceError: A placement is not `Shard`, `Replicate` or a `_StridedShard` that follows the mesh.
        """
        orders: dict[int, list[int]] = {}
        for axis in reversed(range(len(placements))):
            placement = placements[axis]
            if placement.is_replicate():
                continue
            dim = getattr(placement, "dim", None)
            if dim is None or placement.is_partial():
                raise SourceError(
                    "a placement that cannot be exported",
                    name=name,
                    expected="Shard or Replicate",
                    found=placement,
                    fix="Redistribute the tensor before the export",
                )
            _insert_axis(orders.setdefault(dim, []), axis, mesh, getattr(placement, "split_factor", 1), name)
        return cls(mesh, tuple((dim, axis) for dim in sorted(orders) for axis in orders[dim]))

    def box_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the block of a tensor of this shape at a mesh coordinate."""
        start, stop = [0] * len(shape), list(shape)
        for dim, axis in self.cuts:
            size = stop[dim] - start[dim]
            step = -(-size // self.mesh.shape[axis])
            begin = min(coordinate[axis] * step, size)
            stop[dim] = start[dim] + min(begin + step, size)
            start[dim] += begin
        return Box(tuple(start), tuple(stop))

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return the block of a tensor of this shape that a global rank holds."""
        return _box(self, tuple(shape), rank)

    def holders(self, shape: Sequence[int]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Return every distinct block, in the order of the tensor, with the global ranks that hold it."""
        return _holders(self, tuple(shape))


@functools.lru_cache(maxsize=4096)
def _coordinate(mesh: Mesh, rank: int) -> tuple[int, ...]:
    index = mesh.ranks.index(rank)
    coordinate = []
    for size in reversed(mesh.shape):
        index, position = divmod(index, size)
        coordinate.append(position)
    return tuple(reversed(coordinate))


@functools.lru_cache(maxsize=4096)
def _box(sharding: Sharding, shape: tuple[int, ...], rank: int) -> Box:
    return sharding.box_at(shape, sharding.mesh.coordinate(rank))


@functools.lru_cache(maxsize=4096)
def _holders(sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    holders: dict[Box, list[int]] = {}
    for rank, coordinate in zip(sharding.mesh.ranks, product(*map(range, sharding.mesh.shape)), strict=True):
        holders.setdefault(sharding.box_at(shape, coordinate), []).append(rank)
    return tuple((box, tuple(holders[box])) for box in sorted(holders, key=lambda box: (box.start, box.stop)))


def _insert_axis(order: list[int], axis: int, mesh: Mesh, split_factor: int, name: str) -> None:
    """Put an axis into the order in which a dim is cut: after axes to its right that make `split_factor` parts."""
    parts = 1
    for position in range(len(order) + 1):
        if parts == split_factor:
            order.insert(position, axis)
            return
        if position < len(order):
            parts *= mesh.shape[order[position]]
    raise SourceError(
        "a strided shard that does not follow its mesh",
        name=name,
        expected=f"a split factor that mesh axes after {axis} of {mesh} make up",
        found=split_factor,
        fix="Redistribute the tensor to plain Shard placements before the export",
    )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, global shape and dtype of a tensor: what a checkpoint says of it.

    Attributes:
        name: Its name.
        shape: Its global shape.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """Size of dim 0; a 0-dim tensor is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class TensorSpec(TensorInfo):
    """What a source knows of a tensor before a byte of it is read.

    Attributes:
        sharding: Who holds which block of it.
        is_buffer: Whether it is a module's buffer; replicas of a buffer may differ, those of a parameter may not.
    """

    sharding: Sharding
    is_buffer: bool = False
