"""torchtitan's own models, saved by DCP, through torchtitan's own adapters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from dcp_folders import save
from exports import assert_same
from loading import assert_holds, snapshot, spoiled
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torchtitan.models import llama3, qwen3

from fsdp_export import Exporter, export_checkpoint, load_checkpoint, save_checkpoint

FLAVORS = {"llama3": (llama3, "debugmodel"), "qwen3": (qwen3, "debugmodel"), "qwen3_moe": (qwen3, "debugmodel_moe")}


def spec_of(family: ModuleType, flavor: str) -> Any:
    """Return torchtitan's description of a model, of one layer."""
    spec = family.model_registry(flavor)
    del spec.model.layers[1:]
    return spec


def build(spec: Any) -> Any:
    torch.manual_seed(0)
    model = spec.model.build()
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    return model


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_checkpoint_is_what_the_adapter_makes_of_the_full_model(flavor, world_size, tmp_path, monkeypatch):
    spec = spec_of(*FLAVORS[flavor])

    def train() -> None:
        model = sharded(build(spec))
        save(tmp_path / "step-10", {**model.state_dict(), "train_state": {"step": 10}})
        adapter = spec.state_dict_adapter(spec.model, None)
        Exporter(model, adapter=adapter).save(tmp_path / "live", format="safetensors", fsync=False)

    run_ranks(train, world_size)
    expected = spec.state_dict_adapter(spec.model, None).to_hf(build(spec).state_dict())
    module = ModuleType("my_model")
    module.spec = lambda: spec
    monkeypatch.setitem(sys.modules, "my_model", module)
    export_checkpoint(tmp_path / "step-10", tmp_path / "out", adapter="my_model:spec", fsync=False)
    for folder in ("out", "live"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert saved.keys() == expected.keys()
        assert_same({name: saved[name] for name in expected}, expected)


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_its_adapter_made_is_loaded_into_shards_of_its_model(flavor, world_size, tmp_path):
    spec = spec_of(*FLAVORS[flavor])
    export = {"adapter": spec.state_dict_adapter(spec.model, None), "format": "safetensors", "fsync": False}
    save_checkpoint(build(spec), tmp_path / "hf", **export)
    save(tmp_path / "step-10", build(spec).state_dict())

    def load() -> None:
        for path, adapter in (("hf", spec.state_dict_adapter(spec.model, None)), ("step-10", None)):
            expected, model = snapshot(sharded(build(spec))), spoiled(sharded(build(spec)))
            report = load_checkpoint(model, tmp_path / path, adapter=adapter, strict=False)
            # What balances experts is no part of a checkpoint of Hugging Face.
            lost = [name for name in expected if path == "hf" and name.endswith("expert_bias_E")]
            assert list(report.missing) == lost
            assert_holds(model, expected | {name: torch.full_like(expected[name], 3) for name in lost})

    run_ranks(load, world_size)


def sharded(model: Any) -> Any:
    for layer in model.layers.values():
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_the_command_takes_the_registry_of_torchtitan(family, tmp_path):
    from click.testing import CliRunner

    from fsdp_export.cli import main

    registry = {"llama3": llama3, "qwen3": qwen3}[family].model_registry
    spec = registry("debugmodel")
    model = build(spec)
    save(tmp_path / "step-10", model.state_dict())
    reference = f"torchtitan.models.{family}:model_registry('debugmodel')"
    arguments = [str(tmp_path / "step-10"), "--out", str(tmp_path / "out"), "--adapter", reference, "--verify"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    expected = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert_same({name: saved[name] for name in expected}, expected)
    assert_loads_in_transformers(spec, family, tmp_path / "out", expected)


def assert_loads_in_transformers(spec: Any, family: str, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Build the model of transformers that has these sizes, and load the folder into it without a name left over."""
    attention = spec.model.layers[0].attention
    heads = attention.n_kv_heads or attention.n_heads
    config = transformers.AutoConfig.for_model(
        {"llama3": "llama"}.get(family, family),
        vocab_size=spec.model.vocab_size,
        hidden_size=spec.model.dim,
        intermediate_size=expected["model.layers.0.mlp.gate_proj.weight"].shape[0],
        num_hidden_layers=len(spec.model.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=heads,
        head_dim=expected["model.layers.0.self_attn.k_proj.weight"].shape[0] // heads,
        tie_word_embeddings=spec.model.enable_weight_tying,
    )
    loaded = transformers.AutoModelForCausalLM.from_config(config)
    missing, unexpected = loaded.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if spec.model.enable_weight_tying else set())
