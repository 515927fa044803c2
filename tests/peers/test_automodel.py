"""NeMo Automodel's own checkpointer saves, in each of its formats."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hub_folders import new_tokenizer
from layout_runs import MODELS, assert_holds, export
from models import shard
from ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

MESHES = [(2, "1d"), (4, "1d"), (4, "hsdp")]
FORMATS = {
    "sharded": {"model_save_format": "safetensors", "save_consolidated": "false"},
    "consolidated": {"model_save_format": "safetensors", "save_consolidated": "every"},
    "dcp": {"model_save_format": "torch_save", "save_consolidated": "false"},
}
FOUND = {
    "sharded": ("model", "shards of torch's Hugging Face writer, "),
    "consolidated": ("model/consolidated", "Hugging Face folder, "),
    "dcp": ("model", "DCP checkpoint of "),
}


def save_all(root: Path, mesh: str) -> None:
    for name, choices in FORMATS.items():
        config = CheckpointingConfig(checkpoint_dir=str(root / name), **choices)
        checkpointer = config.build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
        model = shard(MODELS["llama"](), mesh, dist.get_world_size())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in (9, 10):
            folder = str(root / name / f"epoch_0_step_{step}")
            checkpointer.save_model(model, folder, tokenizer=new_tokenizer())
            checkpointer.save_optimizer(optimizer, model, folder)
        checkpointer.close()


@pytest.fixture(scope="module", params=MESHES, ids=["-".join(map(str, mesh)) for mesh in MESHES])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    world_size, mesh = request.param
    root = tmp_path_factory.mktemp("automodel")
    MODELS["llama"]()
    run_ranks(save_all, world_size, root, mesh)
    return root


@pytest.mark.parametrize("name", FORMATS)
def test_the_newest_step_is_exported(saved: Path, name: str, tmp_path: Path) -> None:
    exported = export(saved / name, tmp_path / "out")
    inside, found = FOUND[name]
    assert exported.source == saved / name / "epoch_0_step_10" / inside
    assert exported.found.startswith(found)
    assert_holds(exported, MODELS["llama"]().state_dict())
