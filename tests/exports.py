"""What an export must deliver, and whether it did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fsdp_export import Exporter


def expected_export(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of what an export of an unsharded module delivers, in order: of tied tensors the first."""
    seen: set[int] = set()
    expected = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            expected[name] = value.detach().clone()
    return expected


def assert_same(delivered: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, their order, dtypes, shapes and bits."""
    assert list(delivered) == list(expected)
    for name, tensor in delivered.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(_bits(tensor), _bits(expected[name])), (name, tensor, expected[name])


def assert_exports(model: nn.Module, expected: Mapping[str, torch.Tensor], folder: Path, **options: Any) -> None:
    """Export a module in all ways and compare. Collective.

    Args:
        model: The module.
        expected: What must be delivered.
        folder: A folder that all ranks share, for the files.
        **options: For the `Exporter`.
    """
    exporter = Exporter(model, **options)
    assert_same(dict(exporter.tensors()), expected)
    for gather_all in (False, True):
        exporter.save(folder / "export", format="safetensors", gather_all=gather_all, fsync=False)
        saved = load_file(folder / "export" / "model.safetensors")
        assert_same({name: saved.pop(name) for name in expected}, expected)
        assert not saved


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
