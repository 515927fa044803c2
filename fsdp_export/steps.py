"""How inputs become outputs, piece by piece.

A *step* maps input tensors to output tensors. It is cut along dim 0 into *units*: a unit needs its own row of some
inputs, and all of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from .spec import TensorInfo, TensorSpec

__all__ = ["Extent", "Part", "Piece", "Rows", "Step", "StoredPiece", "Window", "copy_step", "row_step"]

Rows = tuple[int, int]
"""The first row of dim 0, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of an output tensor.

    Attributes:
        info: The output: name, global shape, dtype.
        first_row: Where in dim 0 the rows begin.
        tensor: The rows, on any device, in the output's dtype; a 0-dim output comes whole.
    """

    info: TensorInfo
    first_row: int
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return self.tensor.numel() * self.info.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file.

    Attributes:
        file: The file, for messages.
        offset: The first byte.
        num_bytes: How many.
        opened: Gives a descriptor to read the file with, for the time of a context.
    """

    file: Path
    offset: int
    num_bytes: int
    opened: Callable[[], AbstractContextManager[int]]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Some rows of an output tensor that lie in files just as they are to be written.

    Attributes:
        info: The output: name, global shape, dtype.
        first_row: Where in dim 0 the rows begin.
        extents: Where their bytes are, in order.
    """

    info: TensorInfo
    first_row: int
    extents: Sequence[Extent]

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(extent.num_bytes for extent in self.extents)


Convert = Callable[[Sequence[torch.Tensor], int], Iterable[Piece]]


@dataclass(frozen=True, slots=True)
class Part:
    """An output that consists of rows of an input, or of the same elements of each of them.

    Attributes:
        info: The output. Its rows are those of the input, or it is one of these as a whole.
        rows: Which rows of the input.
        inner: Which elements of each: the first, and the strides of the output's dims in a row. None for whole rows.
    """

    info: TensorInfo
    rows: Rows
    inner: tuple[int, tuple[int, ...]] | None = None

    def is_all_of(self, spec: TensorSpec) -> bool:
        """Tell whether the output is the whole input as it is, but for its name and dtype."""
        return self.rows == (0, spec.num_rows) and self.info.shape == spec.shape and self.inner is None

    def of_all(self, inputs: Sequence[torch.Tensor], first_row: int) -> Iterator[Piece]:
        """Convert rows of an input of which this output is all."""
        yield Piece(self.info, first_row, _as(inputs[0], self.info.dtype))

    def within(self, first: int, stop: int) -> tuple[int, Rows] | None:
        """Return where in the output those of its rows begin that a range has, and which rows of the input they are.

        An output without rows is in the ranges that reach to its place.
        """
        low, high = max(first, self.rows[0]), min(stop, self.rows[1])
        is_there = low < high or low == high == self.rows[0] == self.rows[1]
        return (low - self.rows[0], (low, high)) if is_there else None

    def of_rows(self, rows: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Return this output as it lies in rows of a contiguous tensor, without copying."""
        shape = self.info.shape
        if not rows.dim():
            return rows.view(shape)
        if self.rows[1] - self.rows[0] == 1:
            return self.of_each_row(rows[first : first + 1])[0]
        if self.inner is None:
            return rows[first:stop].view(stop - first, *shape[1:])
        offset, strides = self.inner
        begin = int(rows.storage_offset()) + first * rows.stride(0) + offset
        return rows.as_strided((stop - first, *shape[1:]), (rows.stride(0), *strides), begin)

    def of_each_row(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return of every row of a contiguous tensor what lies where this output does in its own, without copying."""
        shape, num_rows = self.info.shape, rows.shape[0]
        if self.inner is None:
            return rows.view(num_rows, *shape).unbind()
        offset, strides = self.inner
        strides = (rows.stride(0), *(0,) * (len(shape) - len(strides)), *strides)
        return rows.as_strided((num_rows, *shape), strides, int(rows.storage_offset()) + offset).unbind()


@dataclass(frozen=True, slots=True)
class Step:
    """Maps inputs to outputs, unit by unit.

    Steps with inputs that are needed whole are converted one at a time.

    Attributes:
        by_unit: Inputs of which unit `i` needs row `i`.
        outputs: What it makes.
        num_units: Number of units.
        read_dtype: The dtype inputs are cast to as they are read, before a gather; None to leave them.
        convert: Maps the rows of a range of units, followed by the inputs that are needed whole, and the first unit,
            to pieces.
        whole: Inputs of which every unit needs all.
        parts: Where every output is rows of the first input, into which others may be merged, or the same of each:
            which. Else empty.
        is_unitwise: Whether every output needs no more than one unit, so that it comes whole with that.
        merged: Inputs that are merged into others, and are no parameters of what is delivered.
        unit_bytes: Bytes that a unit needs for itself, as they are gathered.
        whole_bytes: Bytes that every unit needs, as they are gathered.
    """

    by_unit: tuple[TensorSpec, ...]
    outputs: tuple[TensorInfo, ...]
    num_units: int
    read_dtype: torch.dtype | None
    convert: Convert
    whole: tuple[TensorSpec, ...] = ()
    parts: tuple[Part, ...] = ()
    is_unitwise: bool = False
    merged: tuple[TensorSpec, ...] = ()
    unit_bytes: int = field(init=False)
    whole_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        unit_bytes = sum(self._gathered_bytes(spec, spec.row_bytes) for spec in self.by_unit)
        object.__setattr__(self, "unit_bytes", unit_bytes)
        whole_bytes = sum(self._gathered_bytes(spec, spec.num_bytes) for spec in self.whole)
        object.__setattr__(self, "whole_bytes", whole_bytes)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs, in the order in which `convert` takes them."""
        return self.by_unit + self.whole

    @property
    def num_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(output.num_bytes for output in self.outputs)

    def outputs_of(self, units: Rows) -> list[TensorInfo]:
        """Return the outputs that come whole with a range of units, in the order in which `convert` makes them."""
        if not self.is_unitwise or (self.by_unit and not self.by_unit[0].shape):
            return list(self.outputs)
        inside = (part for part in self.parts if units[0] <= part.rows[0] < units[1])
        return [part.info for part in sorted(inside, key=lambda part: part.rows[0])]

    @property
    def keeps_bytes(self) -> bool:
        """Whether the outputs are rows of the only input, byte for byte."""
        are_rows = bool(self.parts) and all(part.inner is None for part in self.parts)
        return are_rows and len(self.inputs) == 1 and self.outputs[0].dtype == self.by_unit[0].dtype

    def rows_of(self, spec: TensorSpec, blocks: tuple[Rows, ...]) -> tuple[Rows, ...]:
        """Return which rows of an input ranges of units need."""
        return blocks if spec in self.by_unit else ((0, spec.num_rows),)

    def _gathered_bytes(self, spec: TensorSpec, num_bytes: int) -> int:
        return num_bytes * (self.read_dtype or spec.dtype).itemsize // spec.dtype.itemsize


def copy_step(spec: TensorSpec, dtype: torch.dtype | None = None) -> Step:
    """Return the step that delivers a tensor as it is.

    Args:
        spec: The tensor.
        dtype: What to cast it to; None to keep its dtype.
    """
    output = TensorInfo(spec.name, spec.shape, dtype or spec.dtype)
    return _copy_step(spec, Part(output, (0, spec.num_rows)))


def row_step(spec: TensorSpec, parts: tuple[Part, ...]) -> Step:
    """Return the step that cuts a tensor along dim 0, into units that are rows of it.

    A cast that narrows comes before a gather, one that widens after it.

    Args:
        spec: The tensor.
        parts: The outputs, all of one dtype.
    """
    if len(parts) == 1 and parts[0].is_all_of(spec):
        return _copy_step(spec, parts[0])
    outputs, read_dtype = tuple(part.info for part in parts), _narrower(parts[0].info.dtype, spec)
    is_unitwise = all(part.rows[1] - part.rows[0] == 1 for part in parts)
    convert: Convert = partial(_cut_rows, parts)
    if is_unitwise and spec.shape:
        convert = partial(_cut_units, *_by_unit(parts))
    return Step((spec,), outputs, spec.num_rows, read_dtype, convert, parts=parts, is_unitwise=is_unitwise)


def _copy_step(spec: TensorSpec, part: Part) -> Step:
    read_dtype, num_rows = _narrower(part.info.dtype, spec), spec.num_rows
    return Step((spec,), (part.info,), num_rows, read_dtype, part.of_all, parts=(part,), is_unitwise=num_rows == 1)


def _narrower(dtype: torch.dtype, spec: TensorSpec) -> torch.dtype | None:
    return dtype if dtype.itemsize < spec.dtype.itemsize else None


def _by_unit(parts: Sequence[Part]) -> tuple[list[Part], dict[int, list[tuple[int, TensorInfo]]]]:
    """Return one of the parts of each kind, and the outputs of every unit with the index of their kind.

    Parts of a kind, such as one projection of all experts, lie alike in their rows.
    """
    kinds: dict[tuple[object, ...], int] = {}
    examples: list[Part] = []
    by_unit: dict[int, list[tuple[int, TensorInfo]]] = {}
    for part in parts:
        kind = kinds.setdefault((part.info.shape, part.inner), len(kinds))
        if kind == len(examples):
            examples.append(part)
        by_unit.setdefault(part.rows[0], []).append((kind, part.info))
    return examples, by_unit


def _cut_units(
    kinds: Sequence[Part],
    by_unit: Mapping[int, Sequence[tuple[int, TensorInfo]]],
    inputs: Sequence[torch.Tensor],
    first_unit: int,
) -> Iterator[Piece]:
    """Convert to parts of single rows, with one view for all of a kind: one for each takes longer than its gather."""
    rows, dtype = inputs[0].contiguous(), kinds[0].info.dtype
    views = [part.of_each_row(rows) for part in kinds]
    for row in range(rows.shape[0]):
        for kind, info in by_unit.get(first_unit + row, ()):
            yield Piece(info, 0, _as(views[kind][row], dtype))


def _cut_rows(parts: Sequence[Part], inputs: Sequence[torch.Tensor], first_unit: int) -> Iterator[Piece]:
    rows = inputs[0].contiguous()
    for part in parts:
        inside = part.within(first_unit, first_unit + (rows.shape[0] if rows.dim() else 1))
        if inside is not None:
            first_row, (low, high) = inside
            tensor = part.of_rows(rows, low - first_unit, high - first_unit)
            yield Piece(part.info, first_row, _as(tensor, part.info.dtype))


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a dtype, contiguous. What is so already is not handed to torch, which takes its time."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class Window:
    """Units of a step that are read together.

    Attributes:
        step: The step.
        blocks: Disjoint ranges of units, ascending. Inputs hold their rows one after the other.
    """

    step: Step
    blocks: tuple[Rows, ...]

    @property
    def num_units(self) -> int:
        """Number of units in all blocks."""
        return sum(stop - first for first, stop in self.blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs."""
        return self.num_units * self.step.unit_bytes + (self.step.whole_bytes if self.blocks else 0)

    @property
    def outputs(self) -> list[TensorInfo]:
        """What comes whole with these units, in order."""
        return [info for units in self.blocks for info in self.step.outputs_of(units)]

    def part(self, begin: int, end: int) -> Iterator[tuple[int, Rows]]:
        """Yield where in the inputs, and which units, the units `begin` to before `end` of this window are."""
        row = 0
        for first, stop in self.blocks:
            low, high = max(begin, row), min(end, row + stop - first)
            if low < high:
                yield low, (first + low - row, first + high - row)
            row += stop - first
