"""LoRA merged, and the merged model under the names of the hub, against PEFT's merge and `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from dcp_folders import save
from hub_models import hub_model, logits_of
from peft_models import draw, llama, merged, merged_tensors, quiet
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter, export_checkpoint, save_checkpoint

KINDS = ["qwen3-moe", "mixtral", "llava"]
WRAPS = [("root", False), ("all", True)]


def adapted(kind: str) -> Any:
    """Return a model with LoRA on all of its attention, whose numbers are all drawn."""
    with quiet():
        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(hub_model(kind), config)
    draw(model)
    return model.eval()


def wrapped(model: Any, wrap: str, ends: tuple[str, ...] = ("Layer", "Block")) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())) if wrap == "all" else ():
        if type(module).__name__.endswith(ends):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def weights(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.glob("model*")}
    assert files
    return files


def save_on_ranks(folder: Path) -> None:
    for kind in KINDS:
        for wrap, gather_all in WRAPS:
            exporter = Exporter(wrapped(adapted(kind), wrap), bucket_bytes=700)
            out = folder / kind / f"live-{wrap}"
            exporter.save(out, max_shard_size="6KB", fsync=False, gather_all=gather_all)


def test_a_merged_model_has_the_names_and_bytes_of_the_hub(tmp_path):
    run_ranks(save_on_ranks, 2, tmp_path)
    for kind in KINDS:
        model, folder = adapted(kind), tmp_path / kind
        base = merged(model)
        base.save_pretrained(folder / "theirs", max_shard_size="6KB")
        step = save(folder / "step-1", model.state_dict())
        model.peft_config["default"].save_pretrained(step)
        report = export_checkpoint(
            step, folder / "dcp", base_model=folder / "theirs", max_shard_size="6KB", fsync=False, verify=True
        )
        assert any(note.startswith("LoRA adapter of rank 2") for note in report.notes)
        for ours in ("live-root", "live-all", "dcp"):
            assert weights(folder / ours) == weights(folder / "theirs"), (kind, ours)
            loaded, info = type(base).from_pretrained(folder / ours, output_loading_info=True)
            assert {key: list(value) for key, value in info.items() if value} == {}
            assert torch.equal(logits_of(loaded), logits_of(base))


def test_names_that_are_kept_are_not_converted(tmp_path):
    model = adapted("mixtral")
    base = merged(model)
    base.config.save_pretrained(tmp_path / "base")
    assert dict(Exporter(model, lora="keep").tensors()).keys() == model.state_dict().keys()
    step = save(tmp_path / "step-1", model.state_dict())
    options = {"base_model": tmp_path / "base", "format": "safetensors", "lora": "keep"}
    export_checkpoint(step, tmp_path / "out", **options)
    assert load_file(tmp_path / "out/model.safetensors").keys() == model.state_dict().keys()


class WithHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.head = nn.Linear(3, 1)


def test_a_peft_model_inside_of_another_module():
    model = WithHead(adapted("mixtral"))
    expected = {f"pretrained_model.{name}": value for name, value in merged_tensors(model.pretrained_model).items()}
    expected |= {f"head.{name}": value for name, value in model.head.state_dict().items()}
    tensors = dict(Exporter(model).tensors())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def adapted_and_tied(target: str) -> Any:
    with quiet():
        model = peft.get_peft_model(llama(tied=True), peft.LoraConfig(r=2, target_modules=[target]))
    draw(model)
    return model.eval()


def save_tied(folder: Path) -> None:
    """Save models whose embedding and head are sharded one by one, so that they are two parameters."""
    for target in ("embed_tokens", "q_proj"):
        model = wrapped(adapted_and_tied(target), "all", ("Embedding", "Linear"))
        save_checkpoint(model, folder / target, lora="merge", fsync=False)


@pytest.mark.parametrize(("target", "is_tied"), [("embed_tokens", False), ("q_proj", True)])
def test_a_tie_that_wrapping_broke_ends_with_a_merge_into_one_side(target, is_tied, tmp_path):
    run_ranks(save_tied, 2, tmp_path)
    model = adapted_and_tied(target)
    assert json.loads((tmp_path / target / "config.json").read_text())["tie_word_embeddings"] is is_tied
    assert ("lm_head.weight" in load_file(tmp_path / target / "model.safetensors")) is not is_tied
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / target).eval()
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
