"""Tensors that hooks of a module make: they are loaded through its own `load_state_dict`, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_export import load_checkpoint, save_checkpoint
from fsdp_export.errors import SourceError


class Fused(nn.Module):
    """Two projections in one, rows in turn, that are two in its state dict, as torchtitan's are three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(72.0).reshape(12, 6))
        self.norm = nn.Parameter(torch.ones(6))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(_: nn.Module, tensors: dict[str, Any], prefix: str, __: object) -> None:
        weight = tensors.pop(f"{prefix}weight")
        if isinstance(weight, DTensor):
            weight = weight.redistribute(weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)
        q, k = weight.reshape(4, 3, 6), weight.reshape(4, 3, 6)[:, 2]
        tensors |= {f"{prefix}q": q[:, :2].reshape(8, 6).contiguous(), f"{prefix}k": k.contiguous()}

    @staticmethod
    def _merge(_: nn.Module, tensors: dict[str, Any], prefix: str, *__: object) -> None:
        q, k = tensors.pop(f"{prefix}q"), tensors.pop(f"{prefix}k")
        tensors[f"{prefix}weight"] = torch.cat([q.reshape(4, 2, 6), k.reshape(4, 1, 6)], dim=1).reshape(12, 6)


def test_what_a_module_splits_for_its_state_dict_is_put_together_again(tmp_path: Path) -> None:
    save_checkpoint(nn.Sequential(Fused(), Fused()), tmp_path, format="safetensors", fsync=False)
    assert load_file(tmp_path / "model.safetensors").keys() == {
        f"{i}.{name}" for i in "01" for name in ("q", "k", "norm")
    }

    def on_rank() -> None:
        model: Any = nn.Sequential(Fused(), Fused())
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        is_hsdp = dist.get_world_size() == 4
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if is_hsdp else None)
        report = load_checkpoint(model, tmp_path)
        assert report.num_tensors == 6
        for fused in model:
            assert torch.equal(fused.weight.full_tensor(), Fused().weight)
            assert torch.equal(fused.norm.full_tensor(), Fused().norm)
        with torch.device("meta"):
            model = nn.Sequential(Fused(), Fused())
        with pytest.raises(SourceError, match=r"on the meta device, for '0.k'. Call to_empty\(\) before loading"):
            load_checkpoint(fully_shard(model), tmp_path)

    for world_size in (1, 2, 3, 4):
        run_ranks(on_rank, world_size)


class Copying(nn.Module):
    """Has a copy in its state dict, and may drop it again as it is loaded."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(4, 6))
        self.register_state_dict_post_hook(lambda _, tensors, prefix, __: tensors.update(self._copied(tensors, prefix)))
        if drops:
            self.register_load_state_dict_pre_hook(lambda _, tensors, prefix, *__: tensors.pop(f"{prefix}w", None))

    @staticmethod
    def _copied(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
        return {f"{prefix}w": tensors.pop(f"{prefix}own") + 0}


@pytest.mark.parametrize("wraps", [False, True])
def test_values_that_a_module_drops_are_not_lost_without_a_word(wraps: bool, tmp_path: Path) -> None:
    save_file({"0.w": torch.ones(4, 6)}, tmp_path / "model.safetensors")
    for drops, message in (
        (False, "a name that load_state_dict does not know"),
        (True, "found the values from before loading"),
    ):
        copying = Copying(drops=drops)
        model = nn.Sequential(checkpoint_wrapper(copying) if wraps else copying)
        with pytest.raises(SourceError, match=message):
            load_checkpoint(model, tmp_path)


def test_a_load_state_dict_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 6), "v": torch.ones(2, 6)}, tmp_path / "model.safetensors")
    module: Any = nn.Module()
    module.both = nn.Parameter(torch.arange(24.0).view(4, 6))

    def split(_: nn.Module, tensors: dict[str, Any], prefix: str, __: object) -> None:
        both = tensors.pop(f"{prefix}both")
        tensors |= {f"{prefix}w": both[:2] + 0, f"{prefix}v": both[2:] + 0}

    def merge(module: Any, tensors: dict[str, Any], *_: object) -> None:
        module.both.data.zero_()
        raise KeyError("something else")

    module.register_state_dict_post_hook(split)
    module.register_load_state_dict_pre_hook(merge)
    with pytest.raises(SourceError, match="found KeyError: 'something else'"):
        load_checkpoint(module, tmp_path)
    assert torch.equal(module.both, torch.arange(24.0).view(4, 6))


def test_a_rank_without_rows_of_what_hooks_make_loads_its_part_of_the_whole(tmp_path: Path) -> None:
    q, k = torch.randn(8, 6), torch.randn(4, 6)
    save_file({"q": q, "k": k, "norm": torch.ones(6)}, tmp_path / "model.safetensors")

    class Sharded(Fused):
        @staticmethod
        def _split(module: nn.Module, tensors: dict[str, Any], prefix: str, extra: object) -> None:
            mesh, placements = tensors[f"{prefix}weight"].device_mesh, tensors[f"{prefix}weight"].placements
            Fused._split(module, tensors, prefix, extra)
            tensors |= {f"{prefix}{name}": tensors[f"{prefix}{name}"].redistribute(mesh, placements) for name in "qk"}

        @staticmethod
        def _merge(module: Any, tensors: dict[str, Any], prefix: str, *extra: object) -> None:
            own = module.weight
            whole = {f"{prefix}{name}": tensors.pop(f"{prefix}{name}").full_tensor() for name in "qk"}
            Fused._merge(module, whole, prefix, *extra)
            tensors[f"{prefix}weight"] = distribute_tensor(whole[f"{prefix}weight"], own.device_mesh, own.placements)

    def on_rank() -> None:
        model: Any = fully_shard(Sharded())
        load_checkpoint(model, tmp_path)
        merged = torch.cat([q.reshape(4, 2, 6), k.reshape(4, 1, 6)], dim=1).reshape(12, 6)
        assert torch.equal(model.weight.full_tensor(), merged)

    run_ranks(on_rank, 3)
