"""The bytes of a tensor, and the objects that hold no bytes at all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["bytes_of", "without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from looking for garbage, which takes half the time where objects are made that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat, as uint8; on its device, and in its own memory where it is contiguous."""
    tensor = tensor.contiguous()
    # One element is contiguous whatever its stride is, and then cannot be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
