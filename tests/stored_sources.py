"""What sources that read files must hold, compared byte for byte."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from fsdp_export.sources.base import Source


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_equal(read: torch.Tensor, expected: torch.Tensor) -> None:
    assert (read.dtype, read.shape, read.device) == (expected.dtype, expected.shape, expected.device)
    assert torch.equal(as_bytes(read), as_bytes(expected))


def assert_holds(source: Source, expected: Mapping[str, torch.Tensor], *, num_slices: int = 3) -> None:
    """Compare names, order, and every tensor as a whole and in random rows."""
    assert [spec.name for spec in source.specs] == list(expected)
    draw = random.Random(0)
    for spec in source.specs:
        full = expected[spec.name]
        assert (spec.shape, spec.dtype) == (tuple(full.shape), full.dtype)
        assert_equal(source.rows(spec, 0, spec.num_rows), full)
        for _ in range(num_slices if full.dim() else 0):
            first, stop = sorted(draw.randint(0, spec.num_rows) for _ in range(2))
            assert_equal(source.rows(spec, first, stop), full[first:stop])
