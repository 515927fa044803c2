"""DCP checkpoints in all shapes in which trainers save them."""

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_folders import save
from layout_runs import Layout, Runs, assert_exported, each, runs_of
from refused.dcp import Runs as RunsCode
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful

StateDict = dict[str, Any]


@functools.cache
def optimizer_state(model: nn.Module) -> StateDict:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return get_optimizer_state_dict(model, torch.optim.AdamW(trained))


class App(Stateful):
    """What the tutorial of DCP saves."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> StateDict:
        return {"model": get_model_state_dict(self.model), "optim": optimizer_state(self.model)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        raise NotImplementedError


class TrainState(Stateful):
    """Counters as torchtitan has them."""

    def state_dict(self) -> StateDict:
        return {"step": torch.tensor(10, dtype=torch.int32), "ntokens_seen": torch.tensor(1 << 40)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        raise NotImplementedError


def saved_as(make: Callable[[nn.Module], StateDict]) -> Callable[[Path, nn.Module], object]:
    return lambda folder, model: save(folder, make(model))


def below(prefix: str, state_dict: Mapping[str, Any]) -> StateDict:
    return {f"{prefix}{name}": value for name, value in state_dict.items()}


def of_torchtitan(model: nn.Module) -> StateDict:
    """Return the model's names and the optimizer's beside each other, both flat."""
    optimizer = {f"optimizer.{key}": value for key, value in flat(optimizer_state(model)).items()}
    others = {"train_state": TrainState(), "lr_scheduler": {"last_epoch": 10}, "dataloader": {"dp_rank_0": b"state"}}
    return {**get_model_state_dict(model), **optimizer, **others}


def flat(optimizer: StateDict) -> StateDict:
    state = {f"state.{name}.{key}": value for name, of in optimizer["state"].items() for key, value in of.items()}
    return state | {"param_groups": optimizer["param_groups"]}


def of_composer(model: nn.Module) -> StateDict:
    optimizers = {"DecoupledAdamW": optimizer_state(model)}
    state = {"model": below("model.", model.state_dict()), "optimizers": optimizers, "timestamp": {"batch": 10}}
    return {"state": state, "rng": [{"torch": torch.get_rng_state()}]}


def as_lightning(folder: Path, model: nn.Module) -> None:
    """Save a module that has the model in an attribute, and beside it a pickle that runs if it is opened."""
    optimizer = {"state": below("model.", optimizer_state(model)["state"])}
    save(folder, {"model": below("model.", model.state_dict()), "optimizer_0": optimizer})
    if dist.get_rank() == 0:
        (folder / "meta.pt").write_bytes(pickle.dumps(RunsCode(folder / "ran")))


def written_with(**options: Any) -> Callable[[Path, nn.Module], object]:
    """Save with options of torch's writer, or with another writer."""

    def save_with(folder: Path, model: nn.Module) -> None:
        make = options.get("writer", FileSystemWriter)
        choices = {key: value for key, value in options.items() if key != "writer"}
        save(folder, {"model": model.state_dict(), "step": 10}, storage_writer=make(folder, **choices))

    return save_with


def save_zstd(folder: Path, model: nn.Module) -> None:
    if ZStandard.is_available():
        written_with(_extensions=[ZStandard()])(folder, model)


FOUND = "DCP checkpoint of {W} ranks, "
SAFETENSORS = SerializationFormat.SAFETENSORS
LAYOUTS = {
    "flat": Layout(saved_as(nn.Module.state_dict), "step10", FOUND),
    "nested": Layout(
        saved_as(lambda model: {"model": model.state_dict(), "optim": optimizer_state(model), "step": 10}),
        "iter_0000010",
        FOUND,
    ),
    "app": Layout(saved_as(lambda model: {"app": App(model)}), "10", FOUND),
    "torchtitan": Layout(saved_as(of_torchtitan), "step-10", FOUND),
    "composer": Layout(saved_as(of_composer), "ep1-ba10", FOUND),
    "lightning": Layout(as_lightning, "checkpoints/epoch=0-step=10.ckpt", FOUND),
    "nemo rl 1": Layout(saved_as(lambda model: {"model": model.state_dict()}), "step_10/policy/weights", FOUND),
    "nemo rl 2": Layout(saved_as(nn.Module.state_dict), "step_10/policy/weights/model", FOUND),
}
WRITERS = {
    "metadata per rank": lambda folder, model: save(folder, {"model": model.state_dict()}, use_collectives=False),
    "threads": written_with(thread_count=3),
    "files of tensors": written_with(single_file_per_rank=False),
    "safetensors": written_with(serialization_format=SAFETENSORS),
    "safetensors threads": written_with(serialization_format=SAFETENSORS, thread_count=2),
    "fsspec": written_with(writer=FsspecWriter),
    "zstd": save_zstd,
    "not flattened": lambda folder, model: save(
        folder, model.state_dict(), planner=DefaultSavePlanner(flatten_state_dict=False)
    ),
    "replicas of rank 0": lambda folder, model: save(
        folder, {"model": model.state_dict()}, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ),
}
# All that HSDP saves may be in the files of half of the ranks.
FOUND_BY = dict.fromkeys(WRITERS, FOUND) | {"replicas of rank 0": "DCP checkpoint of "}
LAYOUTS |= {name: Layout(writer, "step-10", FOUND_BY[name], models=("tiny",)) for name, writer in WRITERS.items()}
runs = runs_of(LAYOUTS)


@each(LAYOUTS)
def test_every_value_arrives_under_its_name(runs: Runs, layout: str, model: str, tmp_path: Path) -> None:
    if layout == "zstd":
        pytest.importorskip("zstandard")
    assert_exported(runs, LAYOUTS, layout, model, tmp_path / "out")
    assert not list(runs.root.rglob("ran"))
