"""Views of copies of views, against the same done to the indices of all elements."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fsdp_export.conversion.trace import trace
from fsdp_export.conversion.views import Layout, View
from fsdp_export.spec import Sharding, TensorSpec


def _operations(chance: random.Random, tensor: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    dim = chance.randrange(tensor.dim())
    first = chance.randrange(tensor.shape[dim])
    stop = chance.randint(first + 1, tensor.shape[dim])
    other, factor = chance.randrange(tensor.dim()), chance.choice([1, 2, 3])
    return {
        "part": lambda: tensor.narrow(dim, first, stop - first),
        "every other": lambda: tensor[(slice(None),) * dim + (slice(None, None, 2),)],
        "transpose": lambda: tensor.transpose(dim, other),
        "row": lambda: tensor.select(dim, first) if tensor.dim() > 1 else tensor,
        "split": lambda: tensor.unflatten(dim, (factor, -1)) if tensor.shape[dim] % factor == 0 else tensor,
        "add a dim": lambda: tensor.unsqueeze(dim),
        "contiguous copy": tensor.contiguous,
        "copy": tensor.clone,
        "reshape copy": lambda: tensor.reshape(-1, tensor.shape[-1]),
    }


@pytest.mark.parametrize("seed", range(100))
def test_what_is_told_of_a_chain_of_views_and_copies_is_where_the_elements_are(seed: int) -> None:
    shape = tuple(random.Random(seed).choices([1, 2, 3, 4, 6], k=3))
    kinds = random.Random(seed + 1000).choices(list(_operations(random.Random(), torch.empty(1))), k=6)

    def chain(tensor: torch.Tensor) -> torch.Tensor:
        chance = random.Random(seed + 2000)
        for kind in kinds:
            tensor = _operations(chance, tensor)[kind]()
        return tensor

    spec = TensorSpec("x", shape, torch.int64, Sharding.replicated((0,)))
    (traced,) = trace(lambda tensors: {"y": chain(tensors["x"])}, [spec])
    positions = torch.arange(spec.num_bytes // 8).reshape(shape)
    expected = chain(positions)
    assert traced.info.shape == tuple(expected.shape)
    if traced.view is not None:
        found = positions.as_strided(expected.shape, traced.view.strides, traced.view.offset)
        assert torch.equal(found, expected)
    assert traced.view is not None or any("copy" in kind for kind in kinds)  # what is only viewed is always told


def test_a_view_that_runs_over_the_edge_of_a_copied_dim_is_not_told() -> None:
    """Of [4, 6] the columns 0 to 2 of all rows, copied, are read as two rows of six."""
    layout = Layout.of_itself("x", 24).copied((4, 3), View(0, (6, 1)), (3, 1))
    assert layout is not None
    assert layout.find((2, 3), View(3, (3, 1))) == View(6, (6, 1))
    assert layout.find((2, 6), View(0, (6, 1))) is None


def test_a_copy_with_holes_is_not_followed() -> None:
    assert Layout.of_itself("x", 24).copied((4, 3), View(0, (6, 1)), (4, 1)) is None
