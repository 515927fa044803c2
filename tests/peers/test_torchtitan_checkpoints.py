"""torchtitan's own checkpoint manager saves, with its optimizers and schedulers beside the model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_runs import MESHES, MODELS, assert_holds, export
from models import shard
from ranks import run_ranks
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

STEPS = (9, 10)


def manager_of(model: Any, run: Path, **choices: Any) -> CheckpointManager:
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
    optimizers = OptimizersContainer(
        OptimizersContainer.Config(param_groups=groups, implementation="for-loop"), model_parts=[model]
    )
    names = {name: 1 + index % 2 for index, name in enumerate(model.state_dict())}
    adapter: Any = SimpleNamespace(to_hf=dict, fqn_to_index_mapping=names)
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, **choices),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=10),
        states={"train_state": {"step": torch.tensor(10)}},
        sd_adapter=adapter,
        base_folder=str(run),
    )


def save_all(root: Path, mesh: str) -> None:
    for kind, make in MODELS.items():
        model = shard(make(), mesh, dist.get_world_size())
        manager = manager_of(model, root / kind / "outputs")
        for step in STEPS:
            manager.save(step)
        manager_of(model, root / kind / "model-only").save(10, last_step=True)
        if kind == "llama":
            manager_of(model, root / kind / "hf", last_save_in_hf=True).save(10, last_step=True)


@pytest.fixture(scope="module", params=MESHES, ids=["-".join(map(str, mesh)) for mesh in MESHES])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    world_size, mesh = request.param
    root = tmp_path_factory.mktemp("torchtitan")
    MODELS["llama"]()
    run_ranks(save_all, world_size, root, mesh)
    return root


@pytest.mark.parametrize("run", ["outputs", "model-only"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_newest_step_is_exported(saved: Path, kind: str, run: str, tmp_path: Path) -> None:
    exported = export(saved / kind / run, tmp_path / "out")
    assert exported.source == saved / kind / run / "checkpoint" / "step-10"
    assert exported.found.startswith("DCP checkpoint of ")
    assert_holds(exported, MODELS[kind]().state_dict())


@pytest.mark.parametrize("inside", ["", "sharded"])
def test_a_last_step_in_safetensors_is_exported(saved: Path, inside: str, tmp_path: Path) -> None:
    exported = export(saved / "llama" / "hf" / "checkpoint" / "step-10" / inside, tmp_path / "out")
    assert_holds(exported, MODELS["llama"]().state_dict())
