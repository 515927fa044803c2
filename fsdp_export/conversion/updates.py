"""From the names of an adapter's tensors to what they do to a weight; shapes tell how they lie, or that they cannot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import torch

from ..errors import SourceError
from ..spec import TensorSpec
from .low_rank import Form, Update

__all__ = ["ALONE", "Factors", "bias_update", "fits", "token_update", "weight_update"]

ALONE = "Take the adapter alone (--lora adapter, lora='adapter')"
"""The way out of what cannot be merged."""

_OR_ALONE = ALONE[0].lower() + ALONE[1:]
_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MATRIX = 2
_CONVOLUTIONS = (3, 4, 5)


@dataclass(frozen=True)
class Factors:
    """The tensors of an adapter for one weight, by name.

    Attributes:
        first: `A`.
        second: `B`.
        scaling: What the product is multiplied by.
        magnitude: DoRA's norms, if it has any.
        is_transposed: Whether a weight whose shape fits both ways is transposed; None if that is not known.
        has_experts: Whether it is a parameter, of experts mostly, and not the weight of a module.
        is_embedding: Whether it is the weight of an embedding.
    """

    first: str
    second: str
    scaling: float
    magnitude: str | None = None
    is_transposed: bool | None = False
    has_experts: bool = False
    is_embedding: bool = False


def weight_update(
    specs: Mapping[str, TensorSpec], weight: str, factors: Factors, file: str | PathLike[str] | None = None
) -> Update:
    """Return what an adapter does to a weight.

    Args:
        specs: All tensors by name.
        weight: The weight.
        factors: The adapter's tensors.
        file: Where all come from, for messages.

    Raises:
        SourceError: A tensor is missing, does not fit, or is quantized.
    """
    target, first, second = (_find(specs, name, file) for name in (weight, factors.first, factors.second))
    magnitude = _find(specs, factors.magnitude, file) if factors.magnitude is not None else None
    _refuse_quantized(target, file)
    form = _form(target, first, second, factors, file)
    if magnitude is not None:
        _check_size(magnitude, second.num_rows, "norms of DoRA that do not fit the weight", file)
    rounds = factors.has_experts or (factors.is_embedding and magnitude is None)
    return Update(form, target, second, first, factors.scaling, magnitude, rounds=rounds)


def bias_update(
    specs: Mapping[str, TensorSpec],
    bias: str,
    added: str,
    scaling: float,
    file: str | PathLike[str] | None = None,
) -> Update:
    """Return what the bias of an adapter's second matrix does to the bias of the module.

    Raises:
        SourceError: The module has no bias, or it is quantized.
    """
    if bias not in specs:
        what = "a bias of an adapter for a module that has none"
        raise SourceError(what, name=added, file=file, expected=bias, found="none", fix=ALONE)
    _refuse_quantized(specs[bias], file)
    _check_size(_find(specs, added, file), specs[bias].num_rows, "a bias of an adapter that does not fit", file)
    return Update(Form.BIAS, specs[bias], specs[added], scaling=scaling)


def token_update(
    specs: Mapping[str, TensorSpec],
    weight: str,
    trained: str,
    tokens: tuple[int, ...],
    file: str | PathLike[str] | None = None,
) -> Update:
    """Return what trained tokens do to an embedding.

    Raises:
        SourceError: They do not fit it.
    """
    target, rows = _find(specs, weight, file), _find(specs, trained, file)
    _refuse_quantized(target, file)
    expected = (len(tokens), *target.shape[1:])
    if rows.shape != expected or not all(0 <= token < target.num_rows for token in tokens):
        what = "trained tokens that do not fit the weight"
        raise SourceError(what, name=trained, file=file, expected=list(expected), found=list(rows.shape), fix=ALONE)
    return Update(Form.TOKENS, target, rows, tokens=tokens)


def _find(specs: Mapping[str, TensorSpec], name: str, file: str | PathLike[str] | None) -> TensorSpec:
    if name not in specs:
        raise SourceError("LoRA that lacks a tensor", name=name, file=file, fix="Use a checkpoint that has all of it")
    return specs[name]


def _check_size(tensor: TensorSpec, size: int, what: str, file: str | PathLike[str] | None) -> None:
    if math.prod(tensor.shape) != size:
        found, fix = list(tensor.shape), f"Use a checkpoint whose tensors belong together, or: {_OR_ALONE}"
        raise SourceError(what, name=tensor.name, file=file, expected=f"{size:,} numbers", found=found, fix=fix)


def _refuse_quantized(weight: TensorSpec, file: str | PathLike[str] | None) -> None:
    if weight.dtype not in _WIDE:
        raise SourceError(
            "a quantized weight, into which LoRA cannot be merged,",
            name=weight.name,
            file=file,
            expected="float32, bfloat16 or float16",
            found=str(weight.dtype).removeprefix("torch."),
            fix=ALONE,
        )


def _form(
    weight: TensorSpec, first: TensorSpec, second: TensorSpec, factors: Factors, file: str | PathLike[str] | None
) -> Form:
    """Choose how a weight lies to its matrices."""
    forms = _forms(weight, first, second, has_experts=factors.has_experts)
    if not forms:
        raise SourceError(
            "matrices of LoRA that do not fit the weight",
            name=weight.name,
            file=file,
            expected=list(weight.shape),
            found=f"A {list(first.shape)} and B {list(second.shape)}",
            fix=f"Use a checkpoint whose tensors belong together, or: {_OR_ALONE}",
        )
    if len(forms) > 1 and factors.is_transposed is None:
        what = "experts of whose weights the shape does not tell whether they are transposed"
        fix = f"Give the config of the model (--base-model), or: {_OR_ALONE}"
        raise SourceError(what, name=weight.name, file=file, found=list(weight.shape), fix=fix)
    return forms[-1] if factors.is_transposed else forms[0]


def fits(weight: TensorSpec, first: TensorSpec, second: TensorSpec) -> bool:
    """Tell whether matrices can be those of a parameter of experts."""
    return bool(_forms(weight, first, second, has_experts=True))


def _forms(weight: TensorSpec, first: TensorSpec, second: TensorSpec, *, has_experts: bool) -> list[Form]:
    """Return in which ways matrices fit a weight, the transposed one last."""
    shape, num_dims = weight.shape, len(weight.shape)
    if min(len(first.shape), len(second.shape)) < _MATRIX or not 0 < first.shape[0] == second.shape[1]:
        return []
    outer = (second.shape[0], first.shape[1])
    if num_dims == _MATRIX:
        forms = [(Form.DENSE, shape), (Form.TRANSPOSED, shape[::-1])]
    elif has_experts:
        is_whole = num_dims == _MATRIX + 1 and shape[0] > 0 and first.shape[0] % shape[0] == 0
        forms = [(Form.EXPERTS, shape[1:]), (Form.TRANSPOSED_EXPERTS, shape[:0:-1])] if is_whole else []
    else:
        is_convolution = len(first.shape) == num_dims in _CONVOLUTIONS and first.shape[2:] == shape[2:]
        forms = [(Form.CONVOLUTION, shape[:2])] if is_convolution else []
    return [form for form, expected in forms if outer == expected]
