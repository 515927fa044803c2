"""What is put together is followed box by box: patches filled from values give what the conversion makes of these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fsdp_export.conversion.assembly import assemble
from fsdp_export.spec import Box, Sharding, TensorSpec

Tensors = dict[str, torch.Tensor]


def experts(tensors: Tensors) -> torch.Tensor:
    gates = torch.stack([tensors[f"gate{index}"] for index in range(3)])
    ups = torch.stack([tensors[f"up{index}"] for index in range(3)])
    return torch.cat([gates, ups], dim=1)


def interleaved(tensors: Tensors) -> torch.Tensor:
    return tensors["pair"].reshape(2, 3, 5).transpose(0, 1).reshape(6, 5).contiguous()


MADE: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "renamed": lambda tensors: tensors["pair"],
    "experts": experts,
    "experts behind one another": lambda tensors: experts(tensors).flatten(0, 0).transpose(1, 2).contiguous(),
    "part of experts": lambda tensors: experts(tensors)[1:, 2:5, ::1],
    "one of the experts": lambda tensors: experts(tensors)[1].contiguous(),
    "stacked in the middle": lambda tensors: torch.stack([tensors["gate0"], tensors["up0"]], dim=1),
    "joined in columns": lambda tensors: torch.cat([tensors["gate0"], tensors["up1"].t().contiguous().t()], dim=-1),
    "joined twice": lambda tensors: torch.cat([experts(tensors)[0], tensors["gate2"]]),
    "interleaved": interleaved,
    "joined of interleaved": lambda tensors: torch.cat([interleaved(tensors), tensors["pair"]]),
    "transposed": lambda tensors: tensors["pair"].t().contiguous(),
}
COMPUTED: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "sum": lambda tensors: tensors["gate0"] + tensors["up0"],
    "written into": lambda tensors: torch.cat([tensors["gate0"], tensors["up0"]]).mul_(2),
    "cast": lambda tensors: torch.cat([tensors["gate0"].half(), tensors["up0"].half()]),
    "turned over": lambda tensors: torch.cat([tensors["gate0"], tensors["up0"]]).flip(0),
}


def values() -> Tensors:
    torch.manual_seed(0)
    named = {f"{kind}{index}": torch.randn(3, 4) for kind in ("gate", "up") for index in range(3)}
    return {**named, "pair": torch.randn(6, 5)}


def specs() -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(value.shape), value.dtype, Sharding.replicated((0,))) for name, value in values().items()
    ]


@pytest.mark.parametrize("kind", MADE)
def test_patches_give_what_the_conversion_makes_whole_and_in_every_block(kind: str) -> None:
    (made,) = assemble(lambda tensors: {"made": MADE[kind](tensors)}, specs())
    expected = MADE[kind](values())
    assert made.patches is not None
    assert {spec.name for spec in made.inputs} == {patch.source for patch in made.patches}
    for cut in (0, 1):
        for first, stop in ((0, expected.shape[cut]), (1, 2), (1, expected.shape[cut])):
            box = Box(
                tuple(first if dim == cut else 0 for dim in range(expected.dim())),
                tuple(stop if dim == cut else size for dim, size in enumerate(expected.shape)),
            )
            found, times = torch.full(box.shape, float("nan")), torch.zeros(box.shape)
            for patch in filter(None, (patch.within(box) for patch in made.patches)):
                elements = values()[patch.source].as_strided(patch.box.shape, patch.view.strides, patch.view.offset)
                found[patch.box.slices(box.start)] = elements
                times[patch.box.slices(box.start)] += 1
            assert torch.equal(found, expected[box.slices((0,) * expected.dim())])
            assert (times == 1).all()


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_is_computed_has_inputs_and_no_patches(kind: str) -> None:
    (made,) = assemble(lambda tensors: {"made": COMPUTED[kind](tensors)}, specs())
    assert made.patches is None
    assert [spec.name for spec in made.inputs] == ["gate0", "up0"]


def test_what_is_made_of_nothing_is_left_out() -> None:
    assert [made.info.name for made in assemble(lambda t: {"new": torch.ones(2), "a": t["pair"]}, specs())] == ["a"]
