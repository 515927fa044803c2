"""A conversion to tensors that are put together of others, followed on the meta device: which box of which is whose.

The way back of a conversion that splits. Experts that are files of their own fill boxes of the fused tensor, and a
rank reads of each what lies in its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..spec import Box, TensorInfo, TensorSpec
from .trace import ConvertDict, Following, checked, meta_tensors, storage_of, tensors_in, view_of
from .views import View, find_box

__all__ = ["Assembled", "Patch", "assemble"]


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of a tensor, and the elements of an input that fill it.

    Attributes:
        box: The box.
        source: The name of the input.
        view: How the elements lie in the input, which is contiguous.
    """

    box: Box
    source: str
    view: View

    def within(self, block: Box) -> Patch | None:
        """Return the part that is in a block; None where none is."""
        common = self.box.overlap(block)
        if common is None:
            return None
        skipped = (begin - first for begin, first in zip(common.start, self.box.start, strict=True))
        offset = sum(count * stride for count, stride in zip(skipped, self.view.strides, strict=True))
        return Patch(common, self.source, View(self.view.offset + offset, self.view.strides))

    def seen(self, block: Box, dims: Sequence[int | None]) -> Patch:
        """Return what it is of a view of a block that it is in, whose dims are those of the block; see `find_box`."""
        start, stop = (
            tuple(0 if dim is None else edge[dim] - block.start[dim] for dim in dims)
            for edge in (self.box.start, self.box.stop)
        )
        stop = tuple(1 if dim is None else end for dim, end in zip(dims, stop, strict=True))
        strides = tuple(0 if dim is None else self.view.strides[dim] for dim in dims)
        return Patch(Box(start, stop), self.source, View(self.view.offset, strides))

    def put_at(self, position: Sequence[int]) -> Patch:
        """Return the same for a tensor in which what this is a patch of begins at a position."""
        start, stop = (
            tuple(begin + edge for begin, edge in zip(position, edges, strict=True))
            for edges in (self.box.start, self.box.stop)
        )
        return Patch(Box(start, stop), self.source, self.view)

    def stacked(self, dim: int) -> Patch:
        """Return the same for a tensor with one dim of size 1 more."""
        start, stop, strides = (
            (*values[:dim], value, *values[dim:])
            for values, value in ((self.box.start, 0), (self.box.stop, 1), (self.view.strides, 0))
        )
        return Patch(Box(start, stop), self.source, View(self.view.offset, strides))


@dataclass(frozen=True, slots=True)
class Assembled:
    """An output of a conversion that puts together.

    Attributes:
        info: Its name, shape and dtype.
        inputs: What it is made of, in the order of the state dict.
        patches: What fills it, box by box; None where it is computed.
    """

    info: TensorInfo
    inputs: tuple[TensorSpec, ...]
    patches: tuple[Patch, ...] | None


def assemble(convert: ConvertDict, specs: Sequence[TensorSpec]) -> list[Assembled]:
    """Call a conversion once, with all tensors on the meta device. What it makes of no input is left out.

    Args:
        convert: The conversion.
        specs: The tensors.

    Raises:
        PlanError: The conversion fails, or returns what is no dict of tensors.
    """
    inputs = meta_tensors(specs)
    with _Assembling(inputs) as following:
        outputs = checked(lambda: convert(dict(inputs)))
    by_name = {spec.name: spec for spec in specs}
    order = {name: position for position, name in enumerate(inputs)}
    assembled = []
    for name, tensor in outputs.items():
        names = sorted(following.origins(tensor), key=order.__getitem__)
        if names:
            info = TensorInfo(name, tuple(tensor.shape), tensor.dtype)
            patches = following.patches(tensor)
            if patches:  # of what was put together, a part may be left
                names = sorted({patch.source for patch in patches}, key=order.__getitem__)
            assembled.append(Assembled(info, tuple(by_name[origin] for origin in names), patches))
    return assembled


@dataclass(frozen=True, slots=True)
class _Whole:
    """What a dense storage is put together of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    patches: tuple[Patch, ...]


class _Assembling(Following):  # type: ignore[no-untyped-call]
    """Follows, besides, what tensors are put together of."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__(inputs)
        self._wholes: dict[int, _Whole] = {}

    def patches(self, tensor: torch.Tensor) -> tuple[Patch, ...] | None:
        """Return what fills a tensor; None where it was computed, or lies in what is put together in no simple way."""
        shape = tuple(tensor.shape)
        layout = self.layout(tensor)
        boxes = layout.split(shape, view_of(tensor)) if layout is not None else None
        if layout is not None and boxes is not None:
            return tuple(Patch(box, layout.source, view) for box, view in boxes)
        whole = self._wholes.get(storage_of(tensor))
        if whole is None or whole.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        if 0 in shape:
            return ()
        found = find_box(shape, view_of(tensor), whole.shape)
        if found is None:
            return None
        block, dims = found
        inside = (patch.within(block) for patch in whole.patches)
        return tuple(patch.seen(block, dims) for patch in inside if patch is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what its result is put together of."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:  # noqa: SLF001  the only description of an operation
            for tensor in tensors_in((args, kwargs)):
                self._wholes.pop(storage_of(tensor), None)
        for tensor in (result,) if isinstance(result, torch.Tensor) else ():
            if func in _JOINS:
                values = dict(zip(("tensors", "dim"), args, strict=False)) | (kwargs or {})
                self._note(tensor, _joined(func, values, [self.patches(each) for each in values["tensors"]]))
            elif func is torch.ops.aten.clone.default and self.layout(tensor) is None:
                self._note(tensor, self.patches(args[0]))
        return result

    def _note(self, tensor: torch.Tensor, patches: tuple[Patch, ...] | None) -> None:
        self._wholes.pop(storage_of(tensor), None)
        if patches is not None and tensor.is_contiguous():
            self._wholes[storage_of(tensor)] = _Whole(tuple(tensor.shape), tensor.dtype, patches)


_JOINS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


def _joined(func: Any, values: Mapping[str, Any], parts: list[tuple[Patch, ...] | None]) -> tuple[Patch, ...] | None:
    """Return what fills the result of a `cat` or `stack` of tensors that other patches fill."""
    tensors: list[torch.Tensor] = values["tensors"]
    if None in parts or len({(tensor.dtype, tensor.dim()) for tensor in tensors}) > 1:
        return None
    is_stack, num_dims = func is torch.ops.aten.stack.default, tensors[0].dim()
    dim = values.get("dim", 0) % (num_dims + is_stack)
    sizes = [1 if is_stack else tensor.shape[dim] for tensor in tensors]
    patches: list[Patch] = []
    for begin, own in zip(accumulate([0, *sizes[:-1]]), parts, strict=True):
        position = [0] * (num_dims + is_stack)
        position[dim] = begin
        patches += [(patch.stacked(dim) if is_stack else patch).put_at(position) for patch in own or ()]
    return tuple(patches)
