"""Aliases: the names left out are those that `save_pretrained` leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_export.conversion.aliases import declared_aliases, find_aliases
from fsdp_export.conversion.twin import meta_twin

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 16,
    "vocab_size": 32,
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 1), ("ffn_dim", 16))},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}
T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32}


def _qwen2(**changes: object) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**DECODER, **changes}))


def _build(model_class: Any, config: Any) -> Any:
    return model_class(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen2-untied": lambda: _qwen2(tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **DECODER)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(head_dim=8, **DECODER)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "t5-encoder": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**ENCODER_DECODER)),
    "bert-masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "roberta-masked": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL)),
    "bert-to-bert": lambda: transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.BertConfig(**SMALL),
            transformers.BertConfig(is_decoder=True, add_cross_attention=True, **SMALL),
        )
    ),
    "tied-config-without-head": lambda: _build(
        transformers.LlamaForSequenceClassification,
        transformers.LlamaConfig(tie_word_embeddings=True, pad_token_id=0, **DECODER),
    ),
}


def _saved(model: Any, folder: Path) -> tuple[set[str], dict[str, Any]]:
    """Return the names that `save_pretrained` writes, and the config that it writes."""
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    return names, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", MODELS)
def test_aliases_are_what_save_pretrained_leaves_out(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    named = model.state_dict(keep_vars=True)
    saved, config = _saved(model, tmp_path)

    aliases = find_aliases(named, model)

    assert named.keys() - aliases.keys() == saved
    assert all(named[alias] is named[kept] for alias, kept in aliases.items())
    assert declared_aliases(meta_twin(config), named) == aliases


def test_a_tie_that_no_config_declares_is_found_by_identity() -> None:
    model = _qwen2(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert find_aliases(model.state_dict(keep_vars=True), model) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_declared_tie_that_is_none_stays_two_tensors() -> None:
    model = _qwen2(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert find_aliases(model.state_dict(keep_vars=True), model) == {}


def test_of_a_plain_module_the_first_name_is_kept() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"second": shared, "first": nn.Sequential(shared), "other": nn.Linear(3, 3)})
    assert find_aliases(model.state_dict(keep_vars=True), model) == {
        "first.0.weight": "second.weight",
        "first.0.bias": "second.bias",
    }


def test_where_every_name_is_declared_one_stays() -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.b.weight = model.a.weight
    model._tied_weights_keys = {"a.weight": "c.weight", "b.weight": "c.weight"}
    assert find_aliases(model.state_dict(keep_vars=True), model) == {"a.weight": "b.weight"}


def test_equal_memory_and_equal_objects_that_are_no_tensors_are_no_tie() -> None:
    empty: dict[str, Any] = {
        "a": nn.Parameter(torch.empty(0, 3)),
        "b": nn.Parameter(torch.empty(0, 3)),
        "c": None,
        "d": None,
    }
    assert empty["a"].data_ptr() == empty["b"].data_ptr()
    assert find_aliases(empty, nn.Module()) == {}


def test_wrappers_do_not_hide_what_a_class_declares() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            tower: Any = checkpoint_wrapper(_Tower())
            tower.first.weight = self.a.weight
            self.tower = tower

    class _Tower(nn.Module):
        _tied_weights_keys = ("first.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)

    model = Model()
    reversed_names = {"tower.first.weight": model.a.weight, "a.weight": model.a.weight}
    compiled: Any = torch.compile(model, backend="eager")
    assert find_aliases(reversed_names, compiled) == {"tower.first.weight": "a.weight"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"tie_word_embeddings": True}, {"lm_head.weight": "model.embed_tokens.weight"}, id="tied"),
        pytest.param({"tie_word_embeddings": False}, {}, id="untied"),
        pytest.param(
            {"architectures": ["FSDPGemmaForCausalLM"]}, {"lm_head.weight": "model.embed_tokens.weight"}, id="fsdp"
        ),
        pytest.param({}, {"lm_head.weight": "model.embed_tokens.weight"}, id="default-of-the-class"),
        pytest.param({"architectures": ["NobodysForCausalLM"]}, {}, id="unknown-class"),
        pytest.param({"architectures": ["torch"]}, {}, id="no-class"),
        pytest.param({"architectures": None}, {"lm_head.weight": "model.embed_tokens.weight"}, id="no-architectures"),
        pytest.param({"architectures": [], "tie_word_embeddings": False}, {}, id="no-architectures-untied"),
        pytest.param({"architectures": None, "model_type": "nobodys"}, {}, id="unknown-model-type"),
        pytest.param({"architectures": None, "model_type": None}, {}, id="no-model-type"),
        pytest.param({"num_attention_heads": "many"}, {}, id="config-that-no-class-takes"),
        pytest.param({"num_hidden_layers": 10**9}, {}, id="layers-without-end"),
        pytest.param({"architectures": 3, "model_type": ["gemma"]}, {}, id="architectures-and-type-that-are-none"),
        pytest.param(
            {"attn_implementation": "nobody/kernel", "_attn_implementation": "nobody/kernel"},
            {"lm_head.weight": "model.embed_tokens.weight"},
            id="kernel-of-the-hub",
        ),
    ],
)
def test_declared_aliases_of_a_config(config: dict[str, object], expected: dict[str, str]) -> None:
    given = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 8, **DECODER, **config}
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert declared_aliases(meta_twin(given), names) == expected


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied", "gpt2", "t5", "bart"])
def test_a_config_that_was_built_in_code_declares_the_same(kind: str) -> None:
    """`config.save_pretrained`, unlike the model's, writes no `architectures` for a config that no model has saved."""
    model = MODELS[kind]()
    named = model.state_dict(keep_vars=True)
    config = json.loads(model.config.to_json_string(use_diff=True))
    assert not config.get("architectures")
    assert declared_aliases(meta_twin(config), named) == find_aliases(named, model)


def test_declared_aliases_are_those_of_which_both_names_exist() -> None:
    config = {"architectures": ["GemmaForCausalLM"], "head_dim": 8, **DECODER}
    assert declared_aliases(meta_twin(config), ["model.embed_tokens.weight"]) == {}
    assert declared_aliases(meta_twin(config), ["lm_head.weight"]) == {}


def test_a_twin_leaves_the_config_alone() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "default"}, **DECODER}
    before = json.dumps(config)
    meta_twin(config)
    assert json.dumps(config) == before
