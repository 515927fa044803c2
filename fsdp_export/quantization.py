"""Quantized weights: what tensors and configs tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .spec import TensorInfo

__all__ = ["are_packed", "is_quantized", "quantizations"]

_EXACT = frozenset({torch.int64, torch.bool})


def are_packed(tensors: Iterable[TensorInfo]) -> bool:
    """Tell whether tensors hold quantized weights: matrices of integers, or of floats of a byte or less.

    Integers of 64 bits and booleans are buffers: positions, counters, masks.
    """
    return any(
        len(tensor.shape) > 1 and (tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point)
        for tensor in tensors
        if tensor.dtype not in _EXACT and not tensor.dtype.is_complex
    )


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Tell whether a config says that the weights, or those of a part, are quantized."""
    return any(quantizations(config))


def quantizations(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of what says that the weights are quantized, of the whole model or of a part."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            yield (key,)
        yield from ((part, key) for part, value in config.items() if isinstance(value, dict) and value.get(key))
