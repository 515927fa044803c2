"""Which state dicts are adapters, what PEFT calls their tensors, and what these tell."""

from __future__ import annotations

import re

import pytest
import torch
from lora_folders import KINDS, on_disk, peft_model

from fsdp_export.conversion.peft import LoraAdapter, inspect_lora, lora_names
from fsdp_export.spec import TensorInfo

BASE = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
PAIR = [f"{BASE}{Q}.lora_A.weight", f"{BASE}{Q}.lora_B.weight"]


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def infos(tensors):
    return [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def adapter_of(ranks):
    return LoraAdapter(ranks, (), "none", has_magnitudes=False, has_lora_bias=False)


@pytest.mark.parametrize("adapter", ["default", "mine", "lora_A"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_that_peft_saves(kind, adapter):
    model = peft_model(kind, adapter)
    names = trained(model)
    expected = [name for name in on_disk(model, adapter) if ".base_layer." not in name]
    named = lora_names(names, "")
    assert named is not None
    assert (set(named), set(named.values())) == (set(expected), set(names))
    live, saved = model.state_dict(), on_disk(model, adapter)
    assert all(live[old].data_ptr() == saved[new].data_ptr() for new, old in named.items())
    # As they are on disk they stay, and without PEFT's prefix they get it.
    assert lora_names(expected, "") == {name: name for name in expected}
    if kind != "saved":
        bare = [name.removeprefix(BASE) for name in names]
        assert list(lora_names(bare, "") or ()) == list(named)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([f"{Q}.base_layer.weight"], id="peft"),
        pytest.param([f"{Q}.weight"], id="automodel"),
        pytest.param(["model.norm.weight"], id="without PEFT's prefix"),
    ],
)
def test_a_whole_model_with_lora_is_no_adapter(others):
    assert lora_names([name.removeprefix(BASE) for name in PAIR] + others, "") is None
    if "norm" not in others[0]:
        assert lora_names(PAIR + [BASE + name for name in others], "") is None


def test_the_state_dict_of_a_model_with_an_adapter_is_no_adapter():
    for kind in KINDS:
        assert lora_names(list(peft_model(kind).state_dict()), "") is None


@pytest.mark.parametrize("name", ["flora_head.weight", "my_lora_layer.weight", "adapters.0.weight", "w"])
def test_names_that_only_look_like_it(name):
    assert lora_names([name], "") is None


def test_of_several_adapters_the_default_one_is_taken():
    names = [name.replace(".weight", f".{adapter}.weight") for adapter in ("reference", "default") for name in PAIR]
    assert lora_names(names, "") == dict(zip(PAIR, names[2:], strict=True))


def test_the_original_of_a_saved_module_is_left_out():
    saved = f"{BASE}lm_head.modules_to_save.default.weight"
    names = lora_names([*PAIR, saved, f"{BASE}lm_head.original_module.weight"], "")
    assert names == {**{name: name for name in PAIR}, f"{BASE}lm_head.weight": saved}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_variants_are_those_of_peft(kind):
    model = peft_model(kind)
    adapter = inspect_lora(infos(on_disk(model)), "")
    layers = {name: module for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_alpha")}
    assert adapter.ranks == {name: layer.r["default"] for name, layer in layers.items()}
    assert adapter.has_magnitudes == (kind == "dora")
    assert adapter.has_lora_bias == (kind == "saved")
    assert adapter.saved_modules == (("lm_head",) if kind == "saved" else ())
    assert adapter.bias == "none"
    rank = adapter.usual_rank
    for name, expected in adapter.ranks.items():
        patterns = adapter.rank_pattern(rank)
        matched = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)]
        assert matched == ([expected] if expected != rank else [])


@pytest.mark.parametrize(
    ("extra", "bias"),
    [
        ([], "none"),
        ([f"{Q}.base_layer.bias"], "lora_only"),
        ([f"{Q}.base_layer.bias", "model.norm.bias"], "all"),
    ],
    ids=["none", "lora_only", "all"],
)
def test_biases_of_the_base_model_are_told(extra, bias):
    shapes = {PAIR[0]: (2, 6), PAIR[1]: (5, 2), **{BASE + name: (5,) for name in extra}}
    assert lora_names(list(shapes), "") == {name: name for name in shapes}
    adapter = inspect_lora([TensorInfo(name, shape, torch.float32) for name, shape in shapes.items()], "")
    assert (adapter.bias, adapter.saved_modules) == (bias, ())


def test_a_module_that_is_saved_is_named_without_the_modules_in_it():
    names = [f"{BASE}score.{leaf}" for leaf in ("scale", "dense.weight", "dense.bias", "out.weight")]
    shapes = {PAIR[0]: (2, 6), PAIR[1]: (5, 2), **dict.fromkeys(names, (5, 5))}
    adapter = inspect_lora([TensorInfo(name, shape, torch.float32) for name, shape in shapes.items()], "")
    assert adapter.saved_modules == ("score",)


@pytest.mark.parametrize(
    ("modules", "num_layers", "expected"),
    [
        (["layers.0.q", "layers.1.q", "layers.0.v", "lm_head"], 2, ["layers.0.v", "lm_head", "q"]),
        (["layers.0.q", "layers.1.q"], 3, ["layers.0.q", "layers.1.q"]),
        (["layers.0.q", "layers.1.q"], None, ["layers.0.q", "layers.1.q"]),
        (["layers.0.q", "layers.2.q"], 2, ["layers.0.q", "layers.2.q"]),
        (["0.experts.0.q", "0.experts.1.q", "1.experts.0.q", "1.experts.1.q"], 2, ["experts.0.q", "experts.1.q"]),
        (["a.0.q", "b.1.q"], 2, ["a.0.q", "b.1.q"]),
        (["layers.0.q", "layers.1.q"], 10**12, ["layers.0.q", "layers.1.q"]),
    ],
    ids=["all but one", "first layers", "unknown", "holes", "experts", "two stacks", "absurd"],
)
def test_modules_of_all_layers_are_named_once(modules, num_layers, expected):
    assert adapter_of(dict.fromkeys(modules, 4)).target_modules(num_layers) == expected


def test_a_rank_that_all_modules_of_a_name_have_is_told_once():
    adapter = adapter_of({"0.q": 8, "1.q": 8, "0.up": 4, "1.up": 4, "0.v": 8, "1.v": 2})
    assert adapter.usual_rank == 8
    assert adapter.rank_pattern(8) == {"up": 4, r"1\.v": 2}
    assert str(adapter) == "LoRA adapter of ranks 2 to 8 on 6 modules"
