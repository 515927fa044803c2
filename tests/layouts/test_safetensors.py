"""Safetensors that ranks wrote: by torch's Hugging Face writer, as NeMo Automodel and prime-rl lay them out."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_folders import save
from hf_folders import write_index
from layout_runs import Layout, Runs, assert_exported, each, runs_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.tensor import DTensor


def files_of(model: nn.Module) -> dict[str, int]:
    return {name: 1 + index % 2 for index, name in enumerate(model.state_dict())}


def save_shards(folder: Path, model: nn.Module) -> None:
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files_of(model), save_distributed=True)
    save(folder, model.state_dict(), storage_writer=writer)


def save_consolidated(folder: Path, model: nn.Module) -> None:
    """Save shards that torch, in the end, puts together in the folder above."""
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=files_of(model), save_distributed=True, enable_consolidation=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), storage_writer=writer)


def as_automodel(folder: Path, model: nn.Module) -> None:
    """Save a step as NeMo Automodel does without `consolidated/`, which is made afterwards if at all."""
    step = folder.parent
    save_shards(folder, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    save(step / "optim", {"optim": torch.optim.SGD(trained).state_dict(), "moments": {"w": torch.ones(3)}})
    if dist.get_rank() == 0:
        (folder / ".hf_metadata").mkdir()
        (folder / ".hf_metadata" / "fqn_to_file_index_mapping.json").write_text("{}")
        (step.parent / "LATEST").symlink_to(step.name)
    dist.barrier()


def as_automodel_consolidated(folder: Path, model: nn.Module) -> None:
    as_automodel(folder.parent, model)
    if dist.get_rank() == 0:
        folder.mkdir()
        consolidate_safetensors_files(str(folder.parent), str(folder), files_of(model), num_threads=1)


def as_prime_rl(folder: Path, model: nn.Module) -> None:
    """Save whole tensors, each by one rank in a file of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world_size)]
    for index, (name, value) in enumerate(model.state_dict().items()):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        parts[index % world_size][name] = full.contiguous()
    names = [f"model-{1 + part:05}-of-{world_size:05}.safetensors" for part in range(world_size)]
    save_file(parts[rank], folder / names[rank], metadata={"format": "pt"})
    if rank == 0:
        write_index(folder, {name: file for file, part in zip(names, parts, strict=True) for name in part})
        (folder / "STABLE").touch()


SHARDS = "shards of torch's Hugging Face writer, "
LAYOUTS = {
    "shards": Layout(save_shards, "step-10/sharded", SHARDS),
    "consolidated": Layout(save_consolidated, "", "Hugging Face folder, 2 files, ", models=("llama",)),
    "automodel": Layout(as_automodel, "epoch_0_step_10/model", SHARDS),
    "automodel consolidated": Layout(
        as_automodel_consolidated, "epoch_0_step_10/model/consolidated", "Hugging Face folder, 2 files, ", ("llama",)
    ),
    "prime-rl": Layout(as_prime_rl, "", "Hugging Face folder, {W} files, "),
}
runs = runs_of(LAYOUTS)


@each(LAYOUTS)
def test_every_value_arrives_under_its_name(runs: Runs, layout: str, model: str, tmp_path: Path) -> None:
    assert_exported(runs, LAYOUTS, layout, model, tmp_path / "out")
