"""Other values, an EMA say, under the names and in the layout of a module."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exports import assert_exports, assert_same, expected_export
from models import compiled, shard, tiny
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_export import Exporter
from fsdp_export.errors import UsageError

State = dict[str, torch.Tensor]


def average() -> nn.Module:
    """Return a module of the same shapes with no value in common with `tiny()`, not even in its buffers."""
    model = tiny()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(-3).sub_(1)
    return model


def as_dtensors(model: nn.Module) -> State:
    """Return the values distributed like the module, tied names twice."""
    values = average().state_dict()
    return {
        name: distribute_tensor(values[name], own.device_mesh, own.placements)
        if isinstance(own, DTensor)
        else values[name]
        for name, own in model.state_dict().items()
    }


def as_locals(model: nn.Module) -> State:
    return {
        n: value.to_local().clone() if isinstance(value, DTensor) else value for n, value in as_dtensors(model).items()
    }


def without_head(model: nn.Module) -> State:
    return {name: value for name, value in as_locals(model).items() if name != "head.weight"}


def without_embedding(model: nn.Module) -> State:
    return {name: value for name, value in as_locals(model).items() if name != "embed.weight"}


def under_wrapper_names(model: nn.Module) -> State:
    return {
        "_orig_mod." + n.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): v
        for n, v in as_locals(model).items()
    }


def as_parameters(model: nn.Module) -> State:
    return {n: nn.Parameter(v, requires_grad=v.is_floating_point()) for n, v in as_dtensors(model).items()}


@pytest.mark.parametrize("layout", ["1d", "hsdp"])
@pytest.mark.parametrize(
    "form",
    [as_dtensors, as_locals, without_head, without_embedding, under_wrapper_names, as_parameters],
    ids=lambda form: form.__name__,
)
def test_other_values_are_exported(form, layout, tmp_path):
    def check() -> None:
        model = shard(tiny(), layout, 4)
        assert_exports(model, expected_export(average()), tmp_path, state_dict=form(model))

    run_ranks(check, 4)


def test_a_copied_module_is_a_state_dict_too(tmp_path):
    def check() -> None:
        twin = shard(average(), "1d", 2)
        assert_exports(shard(tiny(), "1d", 2), expected_export(average()), tmp_path, state_dict=twin.state_dict())

    run_ranks(check, 2)


def test_values_of_another_dtype_are_exported_in_it():
    model = tiny()
    values = {name: value.double() for name, value in average().state_dict().items()}
    expected = {name: value.double() for name, value in expected_export(average()).items()}
    assert_same(dict(Exporter(model, state_dict=values).tensors()), expected)
    assert_same(
        dict(Exporter(model, state_dict=values, dtype="fp32", include=["embed"]).tensors()),
        {"embed.weight": average().embed.weight},
    )


def test_names_of_ddp(tmp_path):
    def check() -> None:
        model = DistributedDataParallel(tiny())
        twin = DistributedDataParallel(average())
        for state_dict in (twin.state_dict(), twin.module.state_dict()):
            assert_exports(model, expected_export(average()), tmp_path, state_dict=state_dict)

    run_ranks(check, 2)


def test_values_are_read_at_every_use():
    values = {name: value.clone() for name, value in average().state_dict().items()}
    exporter = Exporter(tiny(), state_dict=values)
    assert_same(dict(exporter.tensors()), expected_export(average()))
    values["two_rows"] = torch.full((2, 3), 5.0)
    values["table"].fill_(6)
    assert_same(
        dict(exporter.tensors()),
        {**expected_export(average()), "two_rows": torch.full((2, 3), 5.0), "table": torch.full((3, 2), 6.0)},
    )


def test_names_that_the_module_lacks_are_told_once(caplog):
    values = {**average().state_dict(), "ema_decay": torch.tensor(0.9), "num_updates": torch.tensor(3)}
    exporter = Exporter(tiny(), state_dict=values)
    for _ in range(2):
        assert_same(dict(exporter.tensors()), expected_export(average()))
    assert (
        caplog.text.count("state_dict has names that the module lacks; they are not exported: ema_decay, num_updates")
        == 1
    )


def missing(values: State) -> None:
    del values["blocks.1.up.weight"]


def missing_buffer(values: State) -> None:
    del values["table"]


def missing_tied(values: State) -> None:
    del values["embed.weight"], values["head.weight"]


def misshapen(values: State) -> None:
    values["blocks.1.up.weight"] = torch.zeros(8, 7)


def full(values: State) -> None:
    values["blocks.1.up.weight"] = torch.zeros(7, 8)


def no_tensor(values: Any) -> None:
    values["blocks.1.up.weight"] = [1.0]


def twice(values: State) -> None:
    values["_orig_mod.two_rows"] = values["two_rows"]


REFUSED: list[tuple[Callable[[State], None], str]] = [
    (missing, "no value in state_dict for 'blocks.1.up.weight'. Give a value for every name of the module."),
    (missing_buffer, "no value in state_dict for 'table'. Give a value for every name of the module."),
    (missing_tied, "no value in state_dict for 'embed.weight'. Give a value for every name of the module."),
    (misshapen, "a value of another shape in state_dict for 'blocks.1.up.weight': expected (4, 8), found (8, 7)"),
    (full, "a value of another shape in state_dict for 'blocks.1.up.weight': expected (4, 8), found (7, 8)"),
    (no_tensor, "no tensor in state_dict for 'blocks.1.up.weight': found list"),
    (twice, "two names in state_dict become one for 'two_rows': found _orig_mod.two_rows"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_no_value_is_refused_and_never_replaced_by_the_modules_own(spoil, message, tmp_path):
    def check() -> str:
        model = shard(tiny(), "1d", 2)
        values = as_locals(model)
        spoil(values)
        exporter = Exporter(model, state_dict=values)
        with pytest.raises(UsageError) as caught:
            exporter.save(tmp_path / "out")
        with pytest.raises(UsageError):
            next(exporter.tensors())
        return str(caught.value)

    found = run_ranks(check, 2)
    assert found[0] == found[1]
    assert re.sub(r"^rank 0 \(.*\): |( \(and 1 more rank failed\))$", "", found[0]) == message
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_wrapped_modules_take_values_under_clean_names(tmp_path):
    model = tiny()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    assert_exports(compiled(model), expected_export(average()), tmp_path, state_dict=average().state_dict())
