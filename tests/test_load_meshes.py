"""Saved on one mesh, loaded on another one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import save as save_with_dcp
from hub_models import HUB_MODELS, hub_model, save_as_hub, trained
from loading import assert_holds, on_meta, sharded_oracle, spoiled
from models import offloaded, shard, tiny
from ranks import run_ranks
from torch import nn

from fsdp_export import load_checkpoint, save_checkpoint

LAYOUTS = {1: ["1d"], 2: ["1d", "dim1"], 3: ["1d"], 4: ["1d", "hsdp", "tp", "3d", "dim1", "permuted"]}
FAMILIES = ["qwen3-moe", "gpt-oss", "llava", "qwen3-vl-moe", "dinov2", "llama-tied", "deepseek-v3"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the same values on all meshes, by us and by DCP."""
    root = tmp_path_factory.mktemp("saved")

    def on_rank(world_size: int) -> None:
        for number, layout in enumerate(LAYOUTS[world_size]):
            options = {"offload_policy": offloaded()} if (world_size + number) % 2 else {}
            model = shard(tiny(), layout, world_size, **options)
            save_checkpoint(model, root / f"{world_size}-{layout}", fsync=False)
            if layout != "permuted":  # of which DCP's metadata say other shapes than its files have
                save_with_dcp(root / f"{world_size}-{layout}-dcp", model.state_dict())

    for world_size in LAYOUTS:
        run_ranks(on_rank, world_size, world_size)
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_what_one_mesh_saved_another_one_loads_bit_by_bit(saved: dict[str, Path], world_size: int) -> None:
    # Our own folder is the same whatever mesh has saved it.
    folders = [path for name, path in saved.items() if name.endswith(("dcp", "1d"))]

    def on_rank() -> None:
        for number, layout in enumerate(LAYOUTS[world_size]):
            options = {"offload_policy": offloaded()} if number % 2 else {}
            expected = sharded_oracle(tiny, layout, world_size, **options)
            model = shard(tiny(), layout, world_size, **options)
            identities = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
            for folder in folders:
                report = load_checkpoint(spoiled(model), folder)
                assert_holds(model, expected)
                assert (report.source, report.missing, report.unexpected) == (folder, (), ())
            assert identities == {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}

    assert len(folders) == 13
    run_ranks(on_rank, world_size, timeout=120)


def test_models_as_the_hub_has_them_are_loaded_sharded_and_on_meta(tmp_path: Path) -> None:
    for kind in FAMILIES:
        (tmp_path / kind).mkdir()
        save_as_hub(trained(hub_model(kind)), tmp_path / kind)

    def on_rank() -> None:
        for kind in FAMILIES:
            for layout in ("1d", "dim1"):

                def make(kind: str = kind) -> nn.Module:
                    return trained(hub_model(kind))

                expected = sharded_oracle(make, layout, 2)
                model = shard(hub_model(kind), layout, 2)
                load_checkpoint(spoiled(model), tmp_path / kind)
                assert_holds(model, expected)
                empty = shard(on_meta(HUB_MODELS[kind]), layout, 2)
                load_checkpoint(empty, tmp_path / kind)
                assert_holds(empty, expected)
                assert_same_buffers(empty, hub_model(kind))

    run_ranks(on_rank, 2, timeout=120)


def assert_same_buffers(model: nn.Module, expected: nn.Module) -> None:
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in expected.state_dict():
            assert torch.equal(buffer, buffers[name]), name


def documented(name: str) -> Any:
    """Return a function of the example in docs/loading.md."""
    text = Path(__file__).parents[1].joinpath("docs", "loading.md").read_text()
    (code,) = (block for block in text.split("```python\n") if "def save_step" in block)
    names: dict[str, Any] = {}
    exec(compile(code.partition("```")[0], "docs/loading.md", "exec"), names)  # the example is ours
    return names[name]


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Weights by us and the optimizer by DCP, as documented: on another mesh, the same losses but for the last bits."""
    steps = 3

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        found = []
        for step in range(first, first + steps):
            tokens = torch.arange(12).add(step).remainder(11).view(3, 4)
            loss = model(tokens).log_softmax(-1).mul(torch.linspace(-1, 1, 11)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def started(world_size: int = 0, layout: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = tiny()
        model.two_rows.requires_grad_(False)
        shard(model, layout, world_size) if layout else None
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def first_half(world_size: int, layout: str) -> list[float]:
        model, optimizer = started(world_size, layout)
        found = losses(model, optimizer, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            documented("save_step")(model, optimizer, tmp_path, steps)
        return found

    def second_half(world_size: int, layout: str) -> list[float]:
        model, optimizer = started(world_size, layout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            documented("load_step")(spoiled(model), optimizer, tmp_path, steps)
        return losses(model, optimizer, steps)

    model, optimizer = started()
    uninterrupted = losses(model, optimizer, 0) + losses(model, optimizer, steps)
    before = run_ranks(first_half, 2, 2, "1d")
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{steps}"]
    for world_size, layout in ((3, "1d"), (4, "hsdp")):
        after = run_ranks(second_half, world_size, world_size, layout)
        assert [*before[0], *after[0]] == pytest.approx(uninterrupted, rel=1e-6)
    assert uninterrupted[0] != uninterrupted[-1]
