"""The bytes of a tensor."""

from __future__ import annotations

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat, as uint8; on its device, and in its own memory where it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    # One element is contiguous whatever its stride is, and then cannot be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
