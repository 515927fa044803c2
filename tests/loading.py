"""What a module must hold after loading: the same as one that torch has sharded from full values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import local, shard
from torch import nn

Maker = Callable[[], nn.Module]


def spoiled(model: nn.Module) -> nn.Module:
    """Overwrite all that a module holds here, in place."""
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():
            local(value).fill_(3)
    return model


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy all that a module holds here."""
    return {name: local(value).clone() for name, value in model.state_dict(keep_vars=True).items()}


def assert_holds(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """Compare what a module holds here, bit by bit."""
    found = snapshot(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(_bits(value), _bits(expected[name])), (name, value, expected[name])


def sharded_oracle(make: Maker, layout: str, world_size: int, **options: Any) -> dict[str, torch.Tensor]:
    """Return what each tensor is here when torch shards a model that has its values."""
    return snapshot(shard(make(), layout, world_size, **options))


def on_meta(make: Maker) -> nn.Module:
    with torch.device("meta"):
        return make()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
