"""A live module on every kind of mesh, with rows that do not divide."""

import pytest
import torch
import torch.distributed as dist
from exports import assert_exports, assert_same, expected_export
from models import local, put_local, shard, tiny
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_export import Exporter
from fsdp_export.conversion.aliases import find_aliases
from fsdp_export.errors import DisagreementError, SourceError
from fsdp_export.plan import Plan
from fsdp_export.sources.live import LiveSource, named_tensors
from fsdp_export.spec import TensorSpec
from fsdp_export.steps import copy_step


@pytest.mark.parametrize("layout", ["1d", "dim1", "hsdp", "tp", "3d", "permuted"])
def test_a_mesh(layout, tmp_path):
    def check(tied: bool) -> None:
        assert_exports(shard(tiny(tied=tied), layout, 4), expected_export(tiny(tied=tied)), tmp_path)

    run_ranks(check, 4, True)
    run_ranks(check, 4, False)


@pytest.mark.parametrize("device_mesh", [(2, 2), (3, 2)], ids=["2x2", "3x2"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_fsdp_over_tensor_parallelism_with_uneven_rows(device_mesh, dim, tmp_path):
    """Design rule 3: torch's offsets are wrong for some of these; the tensor that was cut is the oracle."""

    def check() -> None:
        mesh = init_device_mesh("cpu", device_mesh, mesh_dim_names=("dp", "tp"))
        for rows in (8, 6, 5, 7, 27, 2, 1):
            weight = torch.randn(rows, rows + 1, generator=torch.Generator().manual_seed(rows))
            model = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(dim)]))})
            fully_shard(model, mesh=mesh["dp"])
            assert_exports(model, {"w": weight}, tmp_path)

    run_ranks(check, device_mesh[0] * device_mesh[1])


class Partly(nn.Module):
    """As torch's tutorials do it: TP shards the linear layer and leaves the norm alone, FSDP shards both."""

    def __init__(self, mesh: DeviceMesh | None = None, *, drifted: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(10, 6, generator=generator)
        self.norm = nn.RMSNorm(7)
        self.linear = nn.Linear(6, 10, bias=False)
        with torch.no_grad():
            self.norm.weight.copy_(torch.randn(7, generator=generator))
            if drifted and mesh is not None:
                self.norm.weight.add_(mesh["tp"].get_local_rank())
        self.linear.weight = nn.Parameter(weight)
        if mesh is not None:
            self.linear.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
            fully_shard(self, mesh=mesh["dp"])


def test_what_tensor_parallelism_leaves_alone(tmp_path):
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert_exports(Partly(mesh), expected_export(Partly()), tmp_path)

    run_ranks(check, 4)


def test_copies_along_an_axis_that_drifted_apart_are_refused():
    def check() -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(DisagreementError) as caught:
            dict(Exporter(Partly(mesh, drifted=True)).tensors())
        return str(caught.value)

    for message in run_ranks(check, 4):
        assert message.startswith("parameters differ between ranks that have copies of them: norm.weight.")


def test_replicated_dtensors(tmp_path):
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        model = nn.ParameterDict(
            {
                "all": nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Replicate()])),
                "partly": nn.Parameter(distribute_tensor(torch.arange(7.0), mesh, [Replicate(), Shard(0)])),
            }
        )
        assert_exports(model, {"all": torch.arange(6.0), "partly": torch.arange(7.0)}, tmp_path)

    run_ranks(check, 4)


def test_ranks_without_rows_see_no_ties():
    """Case D8: all empty shards lie at the same address."""

    def check() -> None:
        model = nn.ParameterList([torch.randn(2, 3), torch.randn(2, 3)])
        expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        assert_same(dict(Exporter(model).tensors()), {**expected})
        assert find_aliases(named_tensors(model), model) == {}

    run_ranks(check, 4)


@pytest.mark.parametrize("world_size", [64, 1024])
def test_the_plan_of_a_large_world(world_size):
    """Some of its ranks, simulated: they plan the same, and every row is delivered by one rank."""
    simulated = [0, 1, 7, world_size // 2, world_size - 1]

    def check() -> tuple[TensorSpec, ...]:
        rank = simulated[dist.get_rank()]
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        mesh = init_device_mesh("cpu", (world_size // 8, 8), mesh_dim_names=("dp", "tp"))
        model = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.randn(1031, 5), mesh["tp"], [Shard(0)]))})
        model["small"] = nn.Parameter(torch.randn(3, 2))
        fully_shard(model, mesh=mesh["dp"], ignored_params={model["small"]})
        source = LiveSource(model)
        source.refresh()
        held = source.rows(source.specs[0], *source.specs[0].sharding.box((1031, 5), rank).rows)
        assert held.shape == local(model["w"]).shape
        return source.specs

    plans = [Plan(tuple(map(copy_step, specs)), tuple(range(world_size))) for specs in run_ranks(check, len(simulated))]
    assert {plan.digest for plan in plans} == {plans[0].digest}
    windows = [window for rank in range(world_size) for window in plans[0].local_windows(rank)]
    blocks = [block for window in windows if window.step is plans[0].steps[0] for block in window.blocks]
    assert sorted(row for block in blocks for row in range(*block)) == list(range(1031))


def test_half_of_a_parameter_is_no_shard_of_it():
    def check() -> None:
        model = nn.Linear(3, 5)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        put_local(model.weight, local(model.weight)[:1])
        with pytest.raises(SourceError, match=r"a local tensor of another shape for 'weight': expected \(3, 3\)"):
            dict(Exporter(model).tensors())

    run_ranks(check, 2)
