"""Lightning's Trainer and Fabric save with their strategy for FSDP2."""

import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from layout_runs import MODELS, assert_holds, export
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from models import shard_on
from ranks import free_port, run_ranks

WORLD_SIZES = (2, 4)


class Module(lightning.LightningModule):
    """Has the model in an attribute, and sums its parameters, which it never changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = shard_on(MODELS[self.kind](), self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        out = self.net(batch[0].reshape(1, -1))
        return (out if isinstance(out, torch.Tensor) else out.logits).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)


def of_torchrun(port: int) -> None:
    """Set what torchrun sets, which Lightning looks for."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def train(folder: Path, port: int) -> None:
    of_torchrun(port)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for kind in MODELS:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1),
            max_steps=1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            **quiet,
        )
        trainer.fit(Module(kind), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor([1, 2]))))
        trainer.save_checkpoint(folder / kind / "epoch=0-step=1.ckpt")
        trainer.strategy._save_distributed_checkpoint = False
        trainer.save_checkpoint(folder / f"{kind}.ckpt")
        dist.barrier()


def save_with_fabric(folder: Path, port: int) -> None:
    of_torchrun(port)
    size = dist.get_world_size()
    for kind in MODELS:
        strategy = FabricStrategy(
            lambda model, mesh: shard_on(model, mesh["data_parallel"]), data_parallel_size=size, tensor_parallel_size=1
        )
        fabric = lightning.Fabric(accelerator="cpu", devices=size, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(MODELS[kind]())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
        fabric.save(folder / kind / "step-10", {"model": model, "optimizer": optimizer, "step": 10})


@pytest.fixture(scope="module", params=WORLD_SIZES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    MODELS["llama"]()
    run_ranks(train, request.param, folder, free_port())
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_trainer_saved_is_exported(trained: Path, kind: str, tmp_path: Path) -> None:
    exported = export(trained / kind, tmp_path / "out")
    assert exported.source == trained / kind / "epoch=0-step=1.ckpt"
    assert_holds(exported, MODELS[kind]().state_dict())


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_trainer_saved_in_one_file_is_exported(trained: Path, kind: str, tmp_path: Path) -> None:
    exported = export(trained / f"{kind}.ckpt", tmp_path / "out")
    assert_holds(exported, MODELS[kind]().state_dict())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_fabric_saved_is_exported(world_size: int, tmp_path: Path) -> None:
    MODELS["llama"]()
    run_ranks(save_with_fabric, world_size, tmp_path, free_port())
    for kind, make in MODELS.items():
        exported = export(tmp_path / kind, tmp_path / f"{kind}-out")
        assert exported.source == tmp_path / kind / "step-10"
        assert_holds(exported, make().state_dict())
