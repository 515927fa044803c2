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

__all__ = ["ConvertDict", "Traced", "checked", "meta_tensors", "trace"]

ConvertDict = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Maps a state dict, or a part of one, to a state dict with other names and tensors."""


@dataclass(frozen=True, slots=True)
class View:
    """How the elements of an output lie in those of the only input that it is made of.

    Attributes:
        offset: The first element.
        strides: Elements from one index to the next, in every dim.
    """

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """An output of a conversion.

    Attributes:
        info: Its name, shape and dtype.
        inputs: What it is made of, in the order of the state dict.
        view: How it lies in its only input; None where it was computed.
    """

    info: TensorInfo
    inputs: tuple[TensorSpec, ...]
    view: View | None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The rows of its only input that it is, elements and order and all; None where it is anything else."""
        if self.view is None:
            return None
        spec = self.inputs[0]
        row_numel = math.prod(spec.shape[1:])
        numel = math.prod(self.info.shape)
        if not numel:
            return (0, spec.num_rows) if self.info.shape == spec.shape else None
        is_dense = self.view.strides == _dense(self.info.shape, self.view.strides)
        if not is_dense or self.view.offset % row_numel or numel % row_numel:
            return None
        first, count = self.view.offset // row_numel, numel // row_numel
        keeps_rows = self.info.shape[:1] == (count,)
        return (first, first + count) if keeps_rows or count == 1 else None


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
    with _Following(inputs) as following:
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
        view = None if following.is_computed(tensor) else View(int(tensor.storage_offset()), tuple(tensor.stride()))
        traced.append(Traced(info, tuple(by_name[origin] for origin in names), view))
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


def _dense(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; those of dims of size 1 do not matter, and stay."""
    dense, run = list(strides), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            dense[dim] = run
        run *= shape[dim]
    return tuple(dense)


def _storage(tensor: torch.Tensor) -> int:
    # What tells views of one tensor from those of another, on the meta device too.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which inputs went into every storage. Views have the storage of what they are views of.

    Args:
        inputs: The inputs by name.

    Attributes:
        changed: Names of inputs that were written to.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins = {_storage(tensor): frozenset({name}) for name, tensor in inputs.items()}
        self._inputs = {_storage(tensor): (name, tensor.dtype) for name, tensor in inputs.items()}
        self.changed: list[str] = []
        self._alive: list[Any] = []  # the number of a storage that was freed is given to another one

    def origins(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the names of the inputs that went into a tensor."""
        return self._origins.get(_storage(tensor), frozenset())

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is anything else than elements of an input."""
        _, dtype = self._inputs.get(_storage(tensor), ("", None))
        return dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what its results are made of."""
        result = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        arguments = func._schema.arguments  # noqa: SLF001  the only description of an operation
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
        mutated = _tensors([value for name, value in values.items() if name in written])
        origins = frozenset[str]().union(*map(self.origins, given))
        self.changed += [self._inputs[key][0] for key in map(_storage, mutated) if key in self._inputs]
        for tensor in (*_tensors(result), *mutated):
            self._origins[_storage(tensor)] = self.origins(tensor) | origins
            self._alive.append(tensor)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
