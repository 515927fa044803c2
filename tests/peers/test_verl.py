"""verl's own checkpoint manager saves, and its own model merger says what the result should be."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hub_folders import new_tokenizer
from layout_runs import assert_holds, export
from models import hf_model, shard_on
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

MODELS = ("llama", "llama-tied", "qwen2")
MESHES = [(2, ("fsdp",)), (4, ("fsdp",)), (4, ("ddp", "fsdp"))]
CONTENTS = ["model", "optimizer", "extra", "hf_model"]


def save_all(root: Path, axes: tuple[str, ...]) -> None:
    sizes = (dist.get_world_size(),) if len(axes) == 1 else (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    for kind in MODELS:
        model: Any = hf_model(kind)
        model.config.architectures = [type(model).__name__]  # as one that was loaded has it
        shard_on(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        manager = FSDPCheckpointManager(
            model, optimizer, None, new_tokenizer(), checkpoint_config={"save_contents": CONTENTS}
        )
        for step in (9, 10):
            manager.save_checkpoint(str(root / kind / f"global_step_{step}" / "actor"), global_step=step)


@pytest.fixture(scope="module", params=MESHES, ids=["-".join(map(str, (size, *axes))) for size, axes in MESHES])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    world_size, axes = request.param
    root = tmp_path_factory.mktemp("verl")
    hf_model("llama")
    run_ranks(save_all, world_size, root, axes)
    return root


def unsharded(kind: str) -> dict[str, torch.Tensor]:
    """Return what a model's checkpoint holds, of tied tensors the first."""
    state_dict = hf_model(kind).state_dict()
    return {
        name: value for name, value in state_dict.items() if not (kind.endswith("tied") and name == "lm_head.weight")
    }


@pytest.mark.parametrize("kind", MODELS)
def test_what_its_manager_saved_is_exported(saved: Path, kind: str, tmp_path: Path) -> None:
    exported = export(saved / kind, tmp_path / "out")
    assert exported.source == saved / kind / "global_step_10" / "actor"
    assert exported.found.startswith("verl rank files, world size ")
    assert_holds(exported, unsharded(kind))
    assert {"config.json", "tokenizer.json"} < {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("kind", MODELS)
def test_its_merger_makes_the_same_of_it(saved: Path, kind: str, tmp_path: Path) -> None:
    actor = saved / kind / "global_step_10" / "actor"
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(actor),
        target_dir=str(tmp_path / "merged"),
        hf_model_config_path=str(actor / "huggingface"),
    )
    FSDPModelMerger(config).merge_and_save()
    merged = load_all(tmp_path / "merged")
    exported = export(actor, tmp_path / "out", "--dtype", "bfloat16")
    assert merged
    assert_holds(exported, merged)
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert names <= {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("kind", MODELS)
def test_the_whole_model_that_its_manager_saved_beside_it_is_the_same(saved: Path, kind: str, tmp_path: Path) -> None:
    huggingface = saved / kind / "global_step_10" / "actor" / "huggingface"
    assert_holds(export(huggingface, tmp_path / "out"), load_all(huggingface))
    assert load_all(huggingface).keys() == unsharded(kind).keys()


def load_all(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
