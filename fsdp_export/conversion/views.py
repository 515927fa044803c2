"""Strided views, composed: where the elements of a view of a copy of a view lie in the tensor that all began with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import Box

__all__ = ["Layout", "View", "dense_strides", "find_box", "last_element"]


_MAX_BOXES = 10_000


@dataclass(frozen=True, slots=True)
class View:
    """How the elements of a tensor lie in the storage of another one.

    Attributes:
        offset: The first element.
        strides: Elements from one index to the next, in every dim.
    """

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a dense storage come from.

    Attributes:
        source: The name of the tensor whose elements they are.
        offset: Which of its elements is the first one of the storage.
        dims: Size, stride in the storage, and stride in the source of every dim; the strides in the storage descend.
    """

    source: str
    offset: int
    dims: tuple[tuple[int, int, int], ...]

    @classmethod
    def of_itself(cls, name: str, numel: int) -> Layout:
        """Return the layout of a tensor that was not copied."""
        return cls(name, 0, ((numel, 1, 1),))

    def copied(self, shape: Sequence[int], view: View, strides: Sequence[int]) -> Layout | None:
        """Return the layout of a dense copy of a view of this storage.

        Args:
            shape: The shape of the view and of the copy.
            view: How it lies in this storage.
            strides: The strides of the copy.
        """
        seen = self.find(shape, view)
        if seen is None or sorted(zip(strides, shape, strict=True)) != _ladder(shape, strides):
            return None
        dims: list[tuple[int, int, int]] = []
        for stride, size, source_stride in sorted(zip(strides, shape, seen.strides, strict=True), reverse=True):
            if size == 1:
                continue
            if dims and dims[-1][2] == source_stride * size:
                size *= dims.pop()[0]  # noqa: PLW2901  the two are one
            dims.append((size, stride, source_stride))
        return Layout(self.source, seen.offset, tuple(dims))

    def find(self, shape: Sequence[int], view: View) -> View | None:
        """Return how a view of this storage lies in the source; None if no strides say it."""
        if 0 in shape:
            return View(self.offset, view.strides)
        start, steps = self._index(view.offset), [self._index(stride) for stride in view.strides]
        for at, (size, _, _) in enumerate(self.dims):
            if start[at] + sum(step[at] * (n - 1) for step, n in zip(steps, shape, strict=True)) >= size:
                return None  # it runs over the edge of a dim, behind which the elements lie elsewhere
        strides = tuple(self._in_source(step) if n > 1 else 0 for step, n in zip(steps, shape, strict=True))
        return View(self.offset + self._in_source(start), strides)

    def split(self, shape: Sequence[int], view: View) -> list[tuple[Box, View]] | None:
        """Return boxes that make up a view, and how each lies in the source; None if they are too many.

        Args:
            shape: The shape of the view.
            view: How it lies in this storage.
        """
        boxes: list[tuple[Box, View]] = []
        waiting = [(Box.whole(shape), view)]
        while waiting:
            box, part = waiting.pop()
            found = self.find(box.shape, part)
            if found is not None:
                boxes.append((box, found))
                continue
            cut = self._crossing(box.shape, part.strides)
            if cut is None or len(boxes) + len(waiting) > _MAX_BOXES:
                return None
            dim, count = cut
            for first in range(box.start[dim], box.stop[dim], count):
                start, stop = list(box.start), list(box.stop)
                start[dim], stop[dim] = first, min(first + count, box.stop[dim])
                offset = part.offset + (first - box.start[dim]) * part.strides[dim]
                waiting.append((Box(tuple(start), tuple(stop)), View(offset, part.strides)))
        return boxes

    def _crossing(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
        """Return a dim of a view that crosses one of the storage, and how many of its indices do not."""
        for dim, (size, step) in enumerate(zip(shape, strides, strict=True)):
            for _, stride, _ in self.dims:
                if step and step < stride < step * size and stride % step == 0:
                    return dim, stride // step
        return None

    def _index(self, position: int) -> list[int]:
        index = []
        for _, stride, _ in self.dims:
            index.append(position // stride)
            position %= stride
        return index

    def _in_source(self, index: Sequence[int]) -> int:
        return sum(count * stride for count, (_, _, stride) in zip(index, self.dims, strict=True))


def find_box(shape: Sequence[int], view: View, base: Sequence[int]) -> tuple[Box, tuple[int | None, ...]] | None:
    """Return which block of a contiguous tensor a view of it is, its dims perhaps in another order.

    Args:
        shape: The shape of the view.
        view: How it lies in the tensor; it has an element.
        base: The tensor's shape.

    Returns:
        The block, and for every dim of the view the dim of the tensor that it is, None for one of size 1 that may be
        any; None where the view is no block.
    """
    strides = dense_strides(base, [0] * len(base))
    start, rest = [0] * len(base), view.offset
    for dim, stride in enumerate(strides):
        if base[dim] > 1:
            start[dim], rest = divmod(rest, stride)
    stop = [begin + 1 for begin in start]
    by_stride = {stride: dim for dim, stride in enumerate(strides) if base[dim] > 1}
    dims: list[int | None] = []
    for size, stride in zip(shape, view.strides, strict=True):
        own = by_stride.pop(stride, None) if size > 1 else None
        if own is not None:
            stop[own] = start[own] + size
        if size > 1 and (own is None or stop[own] > base[own]):
            return None
        dims.append(own)
    return Box(tuple(start), tuple(stop)), tuple(dims)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; those of dims of size 1 do not matter, and stay."""
    dense, run = list(strides), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            dense[dim] = run
        run *= shape[dim]
    return tuple(dense)


def last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how far behind its first element a tensor reaches."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)


def _ladder(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of stride and size as a dense tensor has them, in the order of the given strides."""
    run, pairs = 1, []
    for stride, size in sorted(zip(strides, shape, strict=True)):
        pairs.append((stride if size == 1 else run, size))
        run *= size
    return pairs
