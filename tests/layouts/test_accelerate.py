"""What accelerate saves, in the folders of a Trainer: beside other state, and without a config."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hub_folders import new_tokenizer
from layout_runs import MODELS, Layout, Runs, assert_exported, command, each, runs_of
from rank_folders import save_as_accelerate
from torch import nn
from torch.distributed.fsdp import StateDictType
from transformers import AutoModelForCausalLM, TrainerState

STEP = "checkpoint-10"
DCP = f"{STEP}/pytorch_model_fsdp_0"


def in_a_step(kind: StateDictType, **options: Any) -> Any:
    """Save model and optimizer with accelerate, and beside them what a Trainer has there."""

    def save(folder: Path, model: nn.Module) -> None:
        step = folder.parent if folder.name != STEP else folder
        step.mkdir(parents=True, exist_ok=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        save_as_accelerate(step, model, kind, optimizer=torch.optim.SGD(trained, momentum=0.9), **options)
        rng = {"python": random.getstate(), "numpy": np.arange(3), "cpu": torch.get_rng_state()}
        torch.save(rng, step / f"rng_state_{dist.get_rank()}.pth")
        if dist.get_rank() == 0:
            torch.save({"last_epoch": 10}, step / "scheduler.pt")
            TrainerState(global_step=10).save_to_json(str(step / "trainer_state.json"))

    return save


LAYOUTS = {
    "dcp": Layout(in_a_step(StateDictType.SHARDED_STATE_DICT), DCP, "DCP checkpoint of {W} ranks, "),
    "rank files": Layout(
        in_a_step(StateDictType.SHARDED_STATE_DICT, use_dcp=False), STEP, "accelerate rank files, world size {W}, mesh "
    ),
    "full": Layout(in_a_step(StateDictType.FULL_STATE_DICT), STEP, "state dict pytorch_model_fsdp.bin, "),
}
runs = runs_of(LAYOUTS)


@each(LAYOUTS)
def test_every_value_arrives_under_its_name(runs: Runs, layout: str, model: str, tmp_path: Path) -> None:
    assert_exported(runs, LAYOUTS, layout, model, tmp_path / "out")
    said = command(runs.folder(layout, model), "--out", tmp_path / "out", "--no-fsync")
    assert ["give --base-model for a Hugging Face folder" in note for note in said["notes"]].count(True) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_config_and_tokenizer_of_the_run_are_taken(runs: Runs, layout: str, tmp_path: Path) -> None:
    run = shutil.copytree(runs.folder(layout, "llama"), tmp_path / "run")
    model: Any = MODELS["llama"]()
    model.config.save_pretrained(run)
    new_tokenizer().save_pretrained(run)
    said = command(run, "--out", tmp_path / "out", "--no-fsync")
    assert {"config.json", "tokenizer.json"} < said["files"].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
