"""Whole models in files: state dicts of `torch.save`, and Hugging Face folders that are sharded, cast or filtered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_runs import MODELS, Layout, Runs, assert_exported, assert_holds, each, export, runs_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

StateDict = dict[str, Any]


def on_rank_0(save: Callable[[Path, StateDict, nn.Module], None]) -> Callable[[Path, nn.Module], None]:
    """Gather the model on rank 0, which saves it."""

    def gather_and_save(folder: Path, model: nn.Module) -> None:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            save(folder, full, model)

    return gather_and_save


def in_a_file(name: str, *path: str) -> Callable[[Path, nn.Module], None]:
    """Save the state dict in a file, nested below keys, beside what a training loop has there."""

    def save(folder: Path, full: StateDict, model: nn.Module) -> None:
        content: Any = dict(full)
        for key in reversed(path):
            content = {key: content, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}
        torch.save(content, folder / name)

    return on_rank_0(save)


def in_parts(folder: Path, full: StateDict, model: nn.Module) -> None:
    """Save as `save_pretrained(safe_serialization=False)` did."""
    file_of = {name: f"pytorch_model-{1 + index % 3:05}-of-00003.bin" for index, name in enumerate(full)}
    for file in set(file_of.values()):
        torch.save({name: value for name, value in full.items() if file_of[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def as_hugging_face(folder: Path, full: StateDict, model: nn.Module) -> None:
    unsharded: Any = MODELS["llama"]()
    unsharded.save_pretrained(folder, state_dict=full, max_shard_size="3KB")


LAYOUTS = {
    "pt": Layout(in_a_file("model.pt"), "", "state dict model.pt, "),
    "pth": Layout(in_a_file("consolidated.00.pth", "model"), "", "state dict consolidated.00.pth, "),
    "bin": Layout(in_a_file("pytorch_model.bin"), "", "state dict pytorch_model.bin, "),
    "ckpt": Layout(in_a_file("last.ckpt", "state_dict"), "", "state dict last.ckpt, "),
    "nested": Layout(in_a_file("ep1.pt", "state", "model"), "", "state dict ep1.pt, "),
    "index": Layout(on_rank_0(in_parts), "", "state dict pytorch_model.bin.index.json, 3 files, "),
    "hugging face": Layout(on_rank_0(as_hugging_face), "", "Hugging Face folder, ", models=("llama",)),
}
runs = runs_of(LAYOUTS)


@each(LAYOUTS)
def test_every_value_arrives_under_its_name(runs: Runs, layout: str, model: str, tmp_path: Path) -> None:
    assert_exported(runs, LAYOUTS, layout, model, tmp_path / "out")


def test_a_hugging_face_folder_is_sharded_anew(runs: Runs, tmp_path: Path) -> None:
    source, out = runs.folder("hugging face", "llama"), tmp_path / "out"
    model: Any = MODELS["llama"]()
    model.config.save_pretrained(tmp_path / "base")
    for max_shard_size in ("2KB", "5GB"):
        exported = export(source, out, "--max-shard-size", max_shard_size, "--base-model", tmp_path / "base")
        assert_holds(exported, model.state_dict())
        sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in out.glob("*.safetensors")]
        assert (len(sizes) > 5) == (max_shard_size == "2KB") == (out / "model.safetensors.index.json").exists()
        largest = max(tensor.nbytes for tensor in model.state_dict().values())
        assert max_shard_size == "5GB" or max(sizes) <= max(2000, largest)
        loaded = type(model).from_pretrained(out).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_hugging_face_folder_is_cast_and_filtered(runs: Runs, tmp_path: Path) -> None:
    source = runs.folder("hugging face", "llama")
    options = ("--dtype", "bfloat16", "--exclude", "lm_head", "--include", "model.layers.*", "--include", "lm_head")
    exported = export(source, tmp_path / "out", *options)
    expected = MODELS["llama"]().to(torch.bfloat16).state_dict()
    assert_holds(exported, {name: value for name, value in expected.items() if name.startswith("model.layers.")})
