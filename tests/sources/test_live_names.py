"""The names of a live module are those it has without wrappers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exports import assert_exports, expected_export
from models import Block, Tiny, compiled, tiny
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_export import Exporter


def wrap_blocks(wrap: Callable[[nn.Module], Any]) -> Callable[[Tiny], Tiny]:
    def wrapped(model: Tiny) -> Tiny:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        return model

    return wrapped


def wrap_inside(model: Tiny) -> Tiny:
    blocks: Any = model.blocks
    for block in blocks:
        block.up = checkpoint_wrapper(block.up)
        block.down = compiled(block.down)
    return model


def compiled_in_place(model: Tiny) -> Tiny:
    model.compile(backend="eager")
    return model


WRAPPERS: dict[str, Callable[[Tiny], Any]] = {
    "compiled": compiled,
    "compiled-blocks": wrap_blocks(compiled),
    "compiled-in-place": compiled_in_place,
    "checkpointed-blocks": wrap_blocks(checkpoint_wrapper),
    "checkpointed-compiled-blocks": wrap_blocks(lambda block: checkpoint_wrapper(compiled(block))),
    "compiled-checkpointed-blocks": wrap_blocks(lambda block: compiled(checkpoint_wrapper(block))),
    "inside-blocks": wrap_inside,
    "all-over": lambda model: compiled(checkpoint_wrapper(wrap_blocks(checkpoint_wrapper)(wrap_inside(model)))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_leave_the_names(wrapper, tmp_path):
    expected = expected_export(tiny())
    assert_exports(WRAPPERS[wrapper](tiny()), expected, tmp_path)

    def check() -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = WRAPPERS[wrapper](tiny())
        for module in list(model.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh)
        assert_exports(fully_shard(model, mesh=mesh), expected, tmp_path)

    run_ranks(check, 2)


class Owner(nn.Module):
    """Owns a submodule that is called like the one of DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.tower = nn.ModuleDict({"module": nn.Linear(2, 2)})


def test_ddp_leaves_the_names_and_a_module_of_that_name_stays(tmp_path):
    def check() -> None:
        torch.manual_seed(0)
        owner = Owner()
        expected = expected_export(owner)
        assert "module.weight" in expected
        for model in (owner, DistributedDataParallel(copy.deepcopy(owner)), compiled(DistributedDataParallel(owner))):
            assert_exports(model, expected, tmp_path)

    run_ranks(check, 2)


def test_what_a_module_holds_beside_tensors_is_left_out(caplog):
    class Stateful(nn.Linear):
        def get_extra_state(self) -> object:
            return {"step": 3}

    torch.manual_seed(0)
    model = Stateful(2, 2)
    exporter = Exporter(model)
    for _ in range(2):
        assert list(dict(exporter.tensors())) == ["weight", "bias"]
    assert caplog.text.count("not tensors, and not exported: _extra_state") == 1
