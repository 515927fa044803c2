"""A conversion of a whole state dict, followed on the meta device: which inputs every output is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ExportError, PlanError, listing
from ..spec import TensorInfo, TensorSpec
from ..steps import Part
from .views import Layout, View, dense_strides, last_element

__all__ = [
    "ConvertDict",
    "Following",
    "Traced",
    "checked",
    "meta_tensors",
    "storage_of",
    "tensors_in",
    "trace",
    "view_of",
]

ConvertDict = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Maps a state dict, or a part of one, to a state dict with other names and tensors."""


@dataclass(frozen=True, slots=True)
class Traced:
    """An output of a conversion.

    Attributes:
        info: Its name, shape and dtype.
        inputs: What it is made of, in the order of the state dict.
        view: How it lies in its only input; None where it was computed.
        storage: A number that it shares with the outputs that lie in one piece of memory with it.
        is_moved: Whether its elements are those of its inputs, however many these are: a cast may come before it.
    """

    info: TensorInfo
    inputs: tuple[TensorSpec, ...]
    view: View | None
    storage: int
    is_moved: bool

    @property
    def whole(self) -> TensorSpec | None:
        """The input that it is under this or another name; None where it is anything else."""
        part = self.part
        is_all = part is not None and part.inner is None and part.rows == (0, self.inputs[0].num_rows)
        return self.inputs[0] if is_all else None

    @property
    def part(self) -> Part | None:
        """Which rows of its only input it is made of, and what of each of them; None where it is anything else."""
        if self.view is None:
            return None
        spec, shape, strides = self.inputs[0], self.info.shape, self.view.strides
        row_numel, numel = math.prod(spec.shape[1:]), math.prod(shape)
        if not numel:
            return Part(self.info, (0, spec.num_rows)) if shape == spec.shape else None
        first, offset = divmod(self.view.offset, row_numel)
        if offset == 0 and numel % row_numel == 0 and strides == dense_strides(shape, strides):
            count = numel // row_numel
            return Part(self.info, (first, first + count)) if shape[:1] == (count,) or count == 1 else None
        count = shape[0] if shape and strides[0] == row_numel else 1
        inner, inner_shape = (strides[1:], shape[1:]) if count > 1 else (strides, shape)
        if offset + last_element(inner_shape, inner) >= row_numel:
            return None
        return Part(self.info, (first, first + count), (offset, inner))


def trace(convert: ConvertDict, specs: Sequence[TensorSpec]) -> list[Traced]:
    """Call a conversion once, with all tensors on the meta device.

    Args:
        convert: The conversion.
        specs: The tensors.

    Returns:
        Its outputs, in their order.

    Raises:
        PlanError: The conversion fails, depends on values, changes what it is given, makes a tensor of none, or returns
            what is no dict of tensors.
    """
    inputs = meta_tensors(specs)
    with Following(inputs) as following:
        outputs = checked(lambda: convert(dict(inputs)))
    if changed := following.changed:
        fix = "Let it make new tensors: these are the ones that training goes on with"
        raise PlanError("the conversion changes tensors in place", found=listing(changed), fix=fix)
    by_name = {spec.name: spec for spec in specs}
    order = {name: position for position, name in enumerate(inputs)}
    traced = []
    for name, tensor in outputs.items():
        names = sorted(following.origins(tensor), key=order.__getitem__)
        if not names:
            raise PlanError(
                "the conversion makes a tensor of no input",
                name=name,
                fix="Leave it out of the conversion, or export it from the checkpoint",
            )
        info = TensorInfo(name, tuple(tensor.shape), tensor.dtype)
        inputs_of_it = tuple(by_name[origin] for origin in names)
        is_moved = following.is_moved(tensor)
        traced.append(Traced(info, inputs_of_it, following.view(tensor), storage_of(tensor), is_moved))
    return traced


def meta_tensors(specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return a tensor without memory for every spec."""
    return {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}


def checked(
    call: Callable[[], Mapping[str, torch.Tensor]], on: str = "on tensors without values"
) -> dict[str, torch.Tensor]:
    """Call a conversion and look at what it returns.

    Args:
        call: Calls it.
        on: What it was given, for the message.

    Raises:
        PlanError: It fails, or returns anything but tensors by their names.
    """
    try:
        outputs = call()
    except ExportError:
        raise
    except Exception as error:
        raise PlanError(
            f"the conversion fails {on}",
            found=f"{type(error).__name__}: {error}",
            fix="It must fit the checkpoint's names and shapes, and not look at values",
        ) from error
    if not isinstance(outputs, Mapping):
        raise PlanError("the conversion returns no state dict", expected="a dict", found=type(outputs).__name__)
    pairs: list[tuple[Any, Any]] = list(outputs.items())
    others = [name for name, value in pairs if not (isinstance(name, str) and _is_plain(value))]
    if others:
        raise PlanError("the conversion returns what is no plain tensor", found=listing(map(repr, others)))
    return dict(outputs)


def _is_plain(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or type(value) not in {torch.Tensor, torch.nn.Parameter}:
        return False
    return value.layout is torch.strided and not value.is_quantized


def view_of(tensor: torch.Tensor) -> View:
    """Return how a tensor lies in its storage."""
    return View(int(tensor.storage_offset()), tuple(tensor.stride()))


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's storage, as long as that lives."""
    # What tells views of one tensor from those of another, on the meta device too.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


# Besides views, of which it knows by their storage: what makes a tensor of nothing but the elements that it is given.
_MOVES = {torch.ops.aten.clone.default, torch.ops.aten.cat.default, torch.ops.aten.stack.default}


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which inputs went into every storage. Views have the storage of what they are views of.

    Args:
        inputs: The inputs by name.

    Attributes:
        changed: Names of inputs that were written to.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins = {storage_of(tensor): frozenset({name}) for name, tensor in inputs.items()}
        self._inputs = {storage_of(tensor): name for name, tensor in inputs.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in inputs.items()}
        self._layouts = {
            storage_of(tensor): Layout.of_itself(name, tensor.numel()) for name, tensor in inputs.items()
        }  # of storages that hold elements of an input and nothing else
        self._moved = {storage_of(tensor): tensor.dtype for tensor in inputs.values()}  # of elements of inputs alone
        self.changed: list[str] = []
        self._alive: list[Any] = []  # the number of a storage that was freed is given to another one

    def origins(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the names of the inputs that went into a tensor."""
        return self._origins.get(storage_of(tensor), frozenset())

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """Return where the elements of a tensor's storage come from; None where they were computed."""
        layout = self._layouts.get(storage_of(tensor))
        if layout is None or self._dtypes[layout.source] != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return layout

    def view(self, tensor: torch.Tensor) -> View | None:
        """Return which elements of an input a tensor is; None where it was computed."""
        layout = self.layout(tensor)
        return layout.find(tuple(tensor.shape), view_of(tensor)) if layout is not None else None

    def is_moved(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has elements of inputs of its dtype, moved and never computed with."""
        return self._moved.get(storage_of(tensor)) == tensor.dtype and not tensor.is_conj() and not tensor.is_neg()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what its results are made of."""
        result = func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        arguments = func._schema.arguments  # noqa: SLF001  the only description of an operation
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
        mutated = tensors_in([value for name, value in values.items() if name in written])
        origins = frozenset[str]().union(*map(self.origins, given))
        self.changed += [self._inputs[key] for key in map(storage_of, mutated) if key in self._inputs]
        for tensor in mutated:
            self._layouts.pop(storage_of(tensor), None)
            self._moved.pop(storage_of(tensor), None)
        if func is torch.ops.aten.clone.default and self.view(given[0]) is not None:
            layout = self._layouts[storage_of(given[0])]
            copied = layout.copied(tuple(result.shape), view_of(given[0]), tuple(result.stride()))
            if copied is not None:
                self._layouts[storage_of(result)] = copied
        if func in _MOVES and all(map(self.is_moved, given)):
            self._moved[storage_of(result)] = result.dtype
        for tensor in (*tensors_in(result), *mutated):
            self._origins[storage_of(tensor)] = self.origins(tensor) | origins
            self._alive.append(tensor)
        return result


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
