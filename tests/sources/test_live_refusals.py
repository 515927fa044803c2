"""Modules that cannot be exported, and what is said of them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import assert_same, expected_export
from models import compiled, shard, tiny
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_export import Exporter
from fsdp_export.errors import ExportError, PlanError, SourceError


def holding(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


def meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def two_names_that_become_one() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["a"].add_module("_orig_mod", nn.Linear(2, 2))
    return model


def sparse() -> nn.Module:
    return holding(w=torch.eye(3).to_sparse())


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the feature is called experimental
        return nn.Sequential(nn.LazyLinear(3))


def reserved() -> nn.Module:
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.zeros(1)))
    return model


ALONE: list[tuple[Callable[[], nn.Module], str]] = [
    (meta, "a tensor without data (on the meta device) for '1.weight'. Load or initialize it first."),
    (
        lambda: holding(w=TwoTensor(torch.ones(2), torch.ones(2))),
        "a tensor subclass for 'w': found TwoTensor. Dequantize or flatten it to plain tensors first.",
    ),
    (sparse, "a layout that cannot be exported for 'w': expected strided, found torch.sparse_coo"),
    (lazy, "a parameter without a shape for '0.weight'. Run the lazy module once."),
    (
        two_names_that_become_one,
        "two names become one without the segments of wrappers for 'a.weight': found a._orig_mod.weight",
    ),
    (reserved, "a reserved name for '__metadata__'. Rename the tensor: a safetensors header uses this name."),
]


@pytest.mark.parametrize(
    ("make", "message"), ALONE, ids=["meta", "subclass", "sparse", "lazy", "two-names", "reserved-name"]
)
def test_refused_by_name(make, message, tmp_path):
    for export in (lambda e: e.save(tmp_path / "out"), lambda e: next(e.tensors()), lambda e: e.plan):
        with pytest.raises((SourceError, PlanError)) as caught:
            export(Exporter(make()))
        assert str(caught.value) == message
    assert not (tmp_path / "out").exists()


def dtensor(device_mesh: Any, *placements: Placement) -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    mesh = device_mesh if isinstance(device_mesh, DeviceMesh) else DeviceMesh("cpu", device_mesh)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False))
    return model


def beside_a_smaller_mesh() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = dtensor(mesh, Shard(0), Shard(1))
    across = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("pair", "across"))["across"]
    model.register_buffer("left", DTensor.from_local(torch.ones(2), across, [Shard(0)], run_check=False))
    return model


def fsdp1() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and slow on the CPU
        return nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


ON_RANKS: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: dtensor(list(range(4)), Partial()),
        (
            f"a placement that cannot be exported for 'weight': expected Shard or Replicate, found {Partial()}. "
            "Redistribute the tensor before the export."
        ),
    ),
    (
        lambda: dtensor(list(range(4)), _StridedShard(0, split_factor=3)),
        (
            "a strided shard that does not follow its mesh for 'weight': "
            "expected a split factor that mesh axes after 0 of 4 make up, found 3. "
            "Redistribute the tensor to plain Shard placements before the export."
        ),
    ),
    (
        lambda: dtensor([[0, 3], [2, 1]], Shard(0), Replicate()),
        (
            "a mesh whose process groups do not follow it for 'weight': "
            "expected ranks in the same order in every row, found [[0, 3], [2, 1]]. "
            "Make the device mesh of ascending ranks."
        ),
    ),
    (fsdp1, "an FSDP1 module, whose shards are flat for '0'. Wrap the model with fully_shard (FSDP2) instead."),
]


@pytest.mark.parametrize(("make", "message"), ON_RANKS, ids=["partial", "strided", "unordered-mesh", "fsdp1"])
def test_refused_on_all_ranks(make, message, tmp_path):
    def check() -> str:
        with pytest.raises(ExportError) as caught:
            Exporter(make()).save(tmp_path / "out")
        return str(caught.value)

    assert run_ranks(check, 4) == [message] * 4
    assert not (tmp_path / "out").exists()


def test_a_mesh_without_some_of_the_ranks_is_refused_by_name():
    def check() -> str:
        with pytest.raises(SourceError) as caught:
            dict(Exporter(beside_a_smaller_mesh()).tensors())
        return str(caught.value)

    for message in run_ranks(check, 4):
        assert "a mesh that does not have all ranks of the export for 'left'" in message
        assert "expected ranks 0, 1, 2, 3, found ranks" in message


def test_each_submesh_can_be_exported_by_itself(tmp_path):
    """Pipeline stages: modules on different ranks, each an export of its own, at the same time."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = mesh.get_local_rank("pp")
        model = shard_on(tiny(tied=stage == 0), mesh["dp"])
        assert_same(dict(Exporter(model).tensors()), expected_export(tiny(tied=stage == 0)))
        Exporter(model).save(tmp_path / str(stage), fsync=False)

    run_ranks(check, 4)
    assert all((Path(tmp_path) / stage / "model.safetensors").is_file() for stage in "01")


def shard_on(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def reshape(model: Any) -> None:
    model.head = nn.Linear(8, 12, bias=False)


def cast(model: Any) -> None:
    model.blocks[1].up.half()


def drop(model: Any) -> None:
    del model.two_rows


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "is_tied", "message"),
    [
        (reshape, False, "head.weight changed"),
        (cast, False, "blocks.1.up.bias, blocks.1.up.weight changed"),
        (drop, False, "two_rows changed"),
        (untie, True, "head.weight is not tied to embed.weight any more"),
    ],
    ids=["shape", "dtype", "name", "tie"],
)
def test_a_module_that_changed_since_it_was_planned(change, is_tied, message):
    model = tiny(tied=is_tied)
    exporter = Exporter(model)
    dict(exporter.tensors())
    change(model)
    for _ in range(2):
        with pytest.raises(SourceError) as caught:
            dict(exporter.tensors())
        assert str(caught.value) == f"the module is not the one that was planned: {message}. Make a new Exporter."
    dict(Exporter(model).tensors())


def test_a_module_that_was_sharded_since_it_was_planned():
    def check() -> None:
        model = tiny()
        exporter = Exporter(model)
        assert len(exporter.plan.outputs) > 10
        shard(model, "1d", 2)
        with pytest.raises(SourceError, match=r"that was planned: blocks\.0\.down\.bias, .* and 7 more changed"):
            dict(exporter.tensors())

    run_ranks(check, 2)


def test_wrapping_since_is_no_change():
    model = tiny()
    exporter = Exporter(model)
    assert_same(dict(exporter.tensors()), expected_export(tiny()))
    model.blocks[0] = compiled(model.blocks[0])
    assert_same(dict(exporter.tensors()), expected_export(tiny()))
