"""From the names of an adapter's tensors to what they do to a weight; shapes tell how they lie, or that they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import torch

from ..errors import SourceError
from ..spec import TensorSpec
from .low_rank import Form, Update

__all__ = ["ALONE", "Factors", "bias_update", "token_update", "weight_update"]

ALONE = "Take the adapter alone (--lora adapter, lora='adapter')"
"""The way out of what cannot be merged."""

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
        has_experts: Whether it is a parameter, of experts, and not the weight of a module.
    """

    first: str
    second: str
    scaling: float
    magnitude: str | None = None
    is_transposed: bool | None = False
    has_experts: bool = False


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
    return Update(form, target, second, first, factors.scaling, magnitude)


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
    return Update(Form.BIAS, specs[bias], _find(specs, added, file), scaling=scaling)


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
    for form in _candidates(weight, first, second, factors):
        if form is None:
            raise SourceError(
                "experts of which the shapes do not tell whether they are transposed",
                name=weight.name,
                file=file,
                found=list(weight.shape),
                fix=f"Give the config of the model (--base-model), or: {ALONE[0].lower()}{ALONE[1:]}",
            )
        return form
    raise SourceError(
        "matrices of LoRA that do not fit the weight",
        name=weight.name,
        file=file,
        expected=list(weight.shape),
        found=f"A {list(first.shape)} and B {list(second.shape)}",
        fix=f"Use a checkpoint whose tensors belong together, or: {ALONE[0].lower()}{ALONE[1:]}",
    )


def _candidates(weight: TensorSpec, first: TensorSpec, second: TensorSpec, factors: Factors) -> list[Form | None]:
    """Return in which way the matrices fit; None where they fit in both and nothing tells which is meant."""
    shape, num_dims = weight.shape, len(weight.shape)
    if factors.has_experts and num_dims == _MATRIX + 1:
        forms = {Form.EXPERTS: (1, 2), Form.TRANSPOSED_EXPERTS: (2, 1)}
        fits = second.shape[1] == first.shape[0] and first.shape[0] % max(shape[0], 1) == 0
    elif num_dims == _MATRIX:
        forms = {Form.DENSE: (0, 1), Form.TRANSPOSED: (1, 0)}
        fits = second.shape[1] == first.shape[0]
    else:
        is_convolution = num_dims in _CONVOLUTIONS and len(first.shape) == len(second.shape) == num_dims
        fits = is_convolution and first.shape[2:] == shape[2:] and second.shape[1] == first.shape[0]
        forms = {Form.CONVOLUTION: (0, 1)}
    if not fits or min(len(first.shape), len(second.shape)) < _MATRIX:
        return []
    found = [form for form, (rows, columns) in forms.items() if (shape[rows], shape[columns]) == _outer(first, second)]
    if len(found) < len(forms) or len(forms) == 1:
        return list(found)
    return [None if factors.is_transposed is None else found[factors.is_transposed]]


def _outer(first: TensorSpec, second: TensorSpec) -> tuple[int, int]:
    return second.shape[0], first.shape[1]
