"""Which parameters classes of transformers keep in float32 when their model is loaded in half of it.

A class names them in `_keep_in_fp32_modules_strict`, and those that only float16 would harm in `_keep_in_fp32_modules`.
Both count for every model that has one of the class inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..dtypes import HALF_DTYPES
from .cut import Conversion
from .peft_module import PeftModule, base_twins
from .transformers import HubForm

__all__ = ["live_in_fp32", "stored_in_fp32"]

_LISTS = {
    torch.float16: ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}


def live_in_fp32(
    model: nn.Module,
    peft: PeftModule | None,
    names: Iterable[str],
    conversion: Conversion | None,
    target: torch.dtype | None,
) -> frozenset[str]:
    """Return the tensors of a live model that `from_pretrained(dtype=target)` would load in float32.

    Args:
        model: The module.
        peft: What PEFT has made of it; None where it has made nothing of it.
        names: Names of the checkpoint.
        conversion: How tensors of the module become those of the checkpoint; None where they stay.
        target: The dtype that others are cast to.
    """
    if target not in HALF_DTYPES:
        return frozenset()
    origins = {name: conversion.made_of(name) if conversion is not None else (name,) for name in names}
    return frozenset().union(*(_listed(twin, path, origins, target) for path, twin in base_twins(model, peft)))


def stored_in_fp32(hub: HubForm, names: Iterable[str], target: torch.dtype | None) -> frozenset[str]:
    """Return the tensors of a checkpoint on disk that `from_pretrained(dtype=target)` would load in float32.

    Args:
        hub: The form of the model of its config.
        names: Names of the checkpoint that is made.
        target: The dtype that others are cast to.
    """
    if target not in HALF_DTYPES:
        return frozenset()
    return _listed(hub.twin, "", {name: hub.inputs.get(name, (name,)) for name in names}, target)


def _listed(twin: nn.Module, path: str, origins: Mapping[str, Sequence[str]], target: torch.dtype) -> frozenset[str]:
    """Return the names that are made of tensors that a model keeps in float32, by what its modules call these."""
    pattern = _pattern(twin, target)
    if pattern is None:
        return frozenset()
    return frozenset(
        output
        for output, names in origins.items()
        if any(name.startswith(path) and pattern.search(name.removeprefix(path)) for name in names)
    )


def _pattern(model: nn.Module, target: torch.dtype) -> re.Pattern[str] | None:
    listed = {
        entry
        for module in model.modules()
        for attribute in _LISTS[target]
        for entry in getattr(module, attribute, None) or ()
    }
    if not listed:
        return None
    # Version 5 looks for them anywhere in a name, version 4 for whole segments.
    if hasattr(model, "_get_dtype_plan"):
        return re.compile("|".join(entry.replace("*", ".*") for entry in sorted(listed)))
    return re.compile("|".join(rf"(^|\.){entry}($|\.)" for entry in sorted(listed)))
