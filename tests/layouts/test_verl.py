"""Rank files of verl, and of SkyRL, which writes the same in folders of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hub_folders import new_tokenizer
from layout_runs import MODELS, Layout, Runs, assert_exported, command, each, runs_of
from models import shard_on
from rank_folders import save_as_verl
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from fsdp_export.cli import main

FOUND = "verl rank files, world size {W}, mesh "


def without_config(folder: Path, model: nn.Module) -> None:
    save_as_verl(folder, model)
    if dist.get_rank() == 0:
        (folder / "fsdp_config.json").unlink()


def on_mesh(*axes: str) -> Callable[[Path, nn.Module], None]:
    """Save the same model from a mesh with these axes, all but the last one of size 2."""

    def save(folder: Path, model: nn.Module) -> None:
        copy = MODELS["tiny" if hasattr(model, "two_rows") else "llama"]()
        sizes = [2] * (len(axes) - 1)
        mesh = init_device_mesh("cpu", (*sizes, dist.get_world_size() // 2 ** len(sizes)), mesh_dim_names=axes)
        save_as_verl(folder, shard_on(copy, mesh))

    return save


def beside_the_run(folder: Path, model: nn.Module) -> None:
    """Save as verl's trainer does, with its data loader above the actor and its last step above that."""
    save_as_verl(folder, model)
    if dist.get_rank() == 0:
        torch.save({"_snapshot": {"_iterator": None}}, folder.parent / "data.pt")
        (folder.parents[1] / "latest_checkpointed_iteration.txt").write_text("10")


def as_skyrl(folder: Path, model: nn.Module) -> None:
    save_as_verl(folder, model)
    if dist.get_rank() == 0:
        torch.save({"global_step": 10, "config": {}}, folder.parent / "trainer_state.pt")
        torch.save({"_snapshot": {}}, folder.parent / "data.pt")
        (folder.parents[1] / "latest_ckpt_global_step.txt").write_text("10")


LAYOUTS = {
    "actor": Layout(beside_the_run, "global_step_10/actor", FOUND),
    "sft": Layout(save_as_verl, "global_step_10", FOUND),
    "no fsdp_config": Layout(without_config, "global_step_10/actor", FOUND),
    "skyrl": Layout(as_skyrl, "global_step_10/policy", FOUND),
    "fsdp": Layout(on_mesh("fsdp"), "global_step_10/actor", FOUND + "{W} (fsdp), "),
    "other axis": Layout(on_mesh("dp_shard"), "global_step_10/actor", FOUND + "{W} (dp_shard), "),
    "ddp and fsdp": Layout(on_mesh("ddp", "fsdp"), "global_step_10/actor", FOUND + "2x"),
}
runs = runs_of(LAYOUTS)


@each(LAYOUTS)
def test_every_value_arrives_under_its_name(runs: Runs, layout: str, model: str, tmp_path: Path) -> None:
    assert_exported(runs, LAYOUTS, layout, model, tmp_path / "out")


@pytest.mark.parametrize("layout", ["actor", "skyrl"])
def test_config_and_tokenizer_beside_the_rank_files_are_taken(runs: Runs, layout: str, tmp_path: Path) -> None:
    run = shutil.copytree(runs.folder(layout, "llama"), tmp_path / "run")
    model: Any = MODELS["llama"]()
    model.config.save_pretrained(run / LAYOUTS[layout].place / "huggingface")
    new_tokenizer().save_pretrained(run / LAYOUTS[layout].place / "huggingface")
    said = command(run, "--out", tmp_path / "out", "--no-fsync")
    assert {"config.json", "tokenizer.json"} < said["files"].keys()
    loaded, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("layout", "other"), [("actor", "critic"), ("skyrl", "critic")])
def test_of_two_models_in_a_step_one_must_be_named(runs: Runs, layout: str, other: str, tmp_path: Path) -> None:
    run = shutil.copytree(runs.folder(layout, "llama"), tmp_path / "run")
    folder = run / LAYOUTS[layout].place
    shutil.copytree(folder, folder.with_name(other))
    result = CliRunner().invoke(main, [str(run), "--dry-run"], prog_name="fsdp-export")
    roles = ", ".join(sorted(f"global_step_10/{role}" for role in (folder.name, other)))
    assert result.exit_code == 2
    assert result.stderr == (
        f"fsdp-export: several checkpoints that could be meant in {run}: found {roles}. Name one of them.\n"
    )
    assert command(folder, "--dry-run")["source"] == str(folder)
