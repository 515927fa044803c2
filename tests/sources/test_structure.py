"""What must be seen of a module that was changed, and that nothing is where it was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exports import assert_same
from models import shard, tiny
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter
from fsdp_export.errors import SourceError
from fsdp_export.sources import live
from fsdp_export.sources.structure import Structure


def keep(model: Any) -> None:
    with torch.no_grad():
        model.two_rows.add_(1)


def replace_parameter(model: Any) -> None:
    model.two_rows = nn.Parameter(torch.ones(2, 3))


def replace_buffer(model: Any) -> None:
    model.table = torch.ones(3, 2)


def rename(model: Any) -> None:
    model.three_rows = model._parameters.pop("two_rows")


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def add_module(model: Any) -> None:
    model.blocks[1].extra = nn.Linear(2, 2)


def replace_module(model: Any) -> None:
    model.blocks[1] = nn.Identity()


def make_persistent(model: Any) -> None:
    model.register_buffer("cache", model.cache, persistent=True)


def hook(model: Any) -> None:
    model.blocks[0].register_state_dict_post_hook(lambda *_: None)


CHANGES = [replace_parameter, replace_buffer, rename, untie, add_module, replace_module, make_persistent, hook]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[Any], None]):
    model = tiny()
    structure = Structure(model)
    keep(model)
    assert structure.is_unchanged()
    change(model)
    assert not structure.is_unchanged()
    assert change is hook or Structure(model).is_unchanged()


def test_a_module_with_a_say_of_its_own_in_its_state_dict_is_never_taken_for_unchanged():
    class Own(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    class Extra(nn.Linear):
        def get_extra_state(self):
            return torch.ones(1)

    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_pre_hook(lambda *_: None)
    for module in (Own(2, 2), Extra(2, 2), hooked):
        assert not Structure(nn.Sequential(module)).is_unchanged()


def test_a_second_walk_takes_no_state_dict_unless_a_forward_left_parameters_unsharded(monkeypatch):
    taken = []
    original = live.named_tensors

    def counted(model: nn.Module) -> dict[str, torch.Tensor]:
        taken.append(model)
        return original(model)

    def check() -> None:
        model = tiny(tied=False)
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        exporter = Exporter(model)
        dict(exporter.tensors())
        num_taken = len(taken)
        before = dict(exporter.tensors())
        assert len(taken) == num_taken
        with torch.no_grad():
            model(torch.arange(4))
        after = dict(exporter.tensors())
        assert len(taken) == num_taken + 1
        assert all(torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items())

    monkeypatch.setattr(live, "named_tensors", counted)
    run_ranks(check, 2)


def test_values_of_a_sharded_module_are_those_of_the_time_of_the_walk():
    def check() -> None:
        model = shard(tiny(), "1d", 2)
        exporter = Exporter(model)
        before = {name: value.clone() for name, value in exporter.tensors()}
        keep(model)
        after = dict(exporter.tensors())
        assert torch.equal(after["two_rows"], before["two_rows"] + 1)

    run_ranks(check, 2)


@pytest.mark.parametrize("layout", ["1d", "dim1"])
def test_a_module_can_be_cast_and_moved_between_two_walks(layout):
    """Torch swaps sharded parameters, and refuses to if anything refers to them."""

    def check() -> None:
        model = shard(tiny(), layout, 2)
        exporter = Exporter(model)
        before = dict(exporter.tensors())
        model.to("cpu")
        assert_same(dict(exporter.tensors()), before)
        model.to(torch.float64)
        with pytest.raises(SourceError, match=r"not the one that was planned: .*two_rows changed|and \d+ more changed"):
            dict(exporter.tensors())
        model.to(torch.float32)
        assert_same(dict(exporter.tensors()), before)
        keep(model)
        assert torch.equal(dict(exporter.tensors())["two_rows"], before["two_rows"] + 1)

    run_ranks(check, 2)


def test_a_parameter_that_is_the_same_one_may_hold_something_else():
    """As one that was replaced by one at its address: nothing keeps it alive."""
    model: Any = nn.Sequential(nn.Linear(3, 2))
    exporter = Exporter(model)
    dict(exporter.tensors())
    for value in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 3)):
        model[0].weight.data = value
        if (value.dtype, value.shape) == (torch.float32, (2, 3)):
            assert torch.equal(dict(exporter.tensors())["0.weight"], value)
        else:
            with pytest.raises(SourceError, match=r"not the one that was planned: 0\.weight changed"):
                dict(exporter.tensors())
