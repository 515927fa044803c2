"""The twin of a config: built without memory, tied, and by every version of transformers alike."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import safe_open
from torch import nn

from fsdp_export.conversion import twin as twin_module
from fsdp_export.conversion.twin import hub_form, meta_twin

LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def saved_shapes(model: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_a_twin_has_the_names_and_shapes_of_the_model_and_no_values(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **LLAMA))
    model.save_pretrained(tmp_path)
    twin: Any = meta_twin(json.loads((tmp_path / "config.json").read_text()))
    assert shapes(twin) == shapes(model)
    assert {value.device.type for value in twin.state_dict().values()} == {"meta"}
    assert twin.lm_head.weight is twin.model.embed_tokens.weight


def test_a_large_twin_costs_no_memory():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    twin: Any = meta_twin({"architectures": ["LlamaForCausalLM"], **sizes, **heads})
    assert twin.num_parameters() == 70_553_706_496


def test_initialization_is_as_it_was():
    before = nn.init.kaiming_uniform_
    meta_twin({"architectures": ["LlamaForCausalLM"], **LLAMA})
    assert nn.init.kaiming_uniform_ is before


@pytest.mark.parametrize("warns", [True, False])
def test_a_config_that_its_class_does_not_take(warns, caplog):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}
    with caplog.at_level(logging.WARNING, "fsdp_export"):
        assert meta_twin(config, warns=warns) is None
    expected = "LlamaForCausalLM cannot be built from its config, so no weight counts as tied and no shape is compared"
    assert [message.startswith(expected) for message in caplog.messages] == [True] * warns


def test_numbers_that_json_has_not():
    """As transformers 5 writes them, of which this is a default of the class."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 2}
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    twin: Any = meta_twin({"architectures": ["Mamba2ForCausalLM"], "vocab_size": 32, **sizes, **limit})
    assert list(twin.config.time_step_limit) == [0.0, float("inf")]


def test_the_hub_form_is_what_save_pretrained_writes(tmp_path):
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**experts, **LLAMA))
    twin = meta_twin({"architectures": ["Qwen3MoeForCausalLM"], **experts, **LLAMA})
    assert twin is not None
    expected = saved_shapes(model, tmp_path)
    assert hub_form(twin, shapes(model)) == expected
    assert expected["model.layers.1.mlp.experts.3.gate_proj.weight"] == (8, 16)


def test_where_nothing_is_converted_the_hub_form_is_that_of_the_modules():
    twin = meta_twin({"architectures": ["LlamaForCausalLM"], **LLAMA})
    assert twin is not None
    assert hub_form(twin, shapes(twin)) == shapes(twin)


def test_a_conversion_that_fails_leaves_the_form_of_the_modules(monkeypatch):
    core = pytest.importorskip("transformers.core_model_loading")
    monkeypatch.delattr(core, "revert_weight_conversion")
    twin = meta_twin({"architectures": ["LlamaForCausalLM"], **LLAMA})
    assert twin is not None
    assert hub_form(twin, ["lm_head.weight"]) == {"lm_head.weight": (32, 16)}
    monkeypatch.setattr(core, "revert_weight_conversion", lambda *_: 1 / 0, raising=False)
    assert hub_form(twin, ["lm_head.weight"]) == {"lm_head.weight": (32, 16)}


CODE = ("attn_implementation", "_attn_implementation", "experts_implementation", "use_kernels")


@pytest.mark.parametrize("key", CODE)
def test_implementations_that_a_config_names_are_not_looked_for(key, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        pytest.fail("code of a repository would be loaded")

    from transformers.integrations import hub_kernels

    for name in dir(hub_kernels):
        if name.startswith(("load", "get_kernel", "register")) and callable(getattr(hub_kernels, name)):
            monkeypatch.setattr(hub_kernels, name, fail)
    code = {key: "someone/kernels"}
    twin: Any = meta_twin({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA, **code})
    assert twin is not None
    assert "someone" not in str(vars(twin.config))


def test_a_model_with_many_more_tensors_than_the_checkpoint_is_not_built(monkeypatch, caplog):
    config = {"architectures": ["LlamaForCausalLM"], **LLAMA}
    assert meta_twin({**config, "num_hidden_layers": 1003}, 2) is None
    monkeypatch.setattr(twin_module, "_MORE_NAMES", 4)
    monkeypatch.setattr(twin_module, "_CALLS_PER_NAME", 3)
    assert meta_twin({**config, "num_hidden_layers": 6}, 2) is None
    assert [message.rpartition("compared: ")[2] for message in caplog.messages] == [
        "num_hidden_layers is 1,003, and the checkpoint has 2 tensors",
        "a model with many more tensors than the checkpoint",
    ]
