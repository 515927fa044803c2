"""Casts to half precision, against `from_pretrained(dtype=...)` of the checkpoint in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dcp_folders import save
from exports import assert_same
from hub_models import TEXT, hub_model
from models import compiled
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.utils import logging

from fsdp_export import Exporter, export_checkpoint, save_checkpoint
from fsdp_export.conversion.full_precision import live_in_fp32

IS_4 = not hasattr(transformers, "WeightConverter")

core = pytest.mark.skipif(IS_4, reason="transformers 4 lists fewer parameters, and none of a model inside of another")

# Tensors that stay in float32, and one that does not although it looks like it.
CASES: dict[str, tuple[str, torch.dtype, str, str]] = {
    "deepseek-v3-bf16": ("deepseek-v3", torch.bfloat16, "model.layers.1.mlp.gate.e_score_correction_bias", "lm_head"),
    "t5-fp16": ("t5", torch.float16, "decoder.block.0.layer.2.DenseReluDense.wo.weight", "shared"),
    "t5-bf16": ("t5", torch.bfloat16, "", "decoder.block.0.layer.2.DenseReluDense.wo"),
    "gpt-oss-fp16": ("gpt-oss", torch.float16, "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.router"),
    "glm4v-moe-bf16": ("glm4v-moe", torch.bfloat16, "model.language_model.layers.1.mlp.gate.weight", "lm_head"),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()


def glm4v_moe() -> Any:
    """Return a model that has one inside whose class keeps routers in float32."""
    vision: Any = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    vision |= {"patch_size": 4, "image_size": 8, "temporal_patch_size": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    text: Any = {**TEXT, **experts, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 0, 0]}}
    config = transformers.Glm4vMoeConfig(text_config=text, vision_config=vision)
    return transformers.Glm4vMoeForConditionalGeneration(config)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return glm4v_moe() if kind == "glm4v-moe" else hub_model(kind)


def save_as_loaded(kind: str, dtype: torch.dtype, folder: Path) -> None:
    """Save what `from_pretrained(dtype=...)` makes of a model in float32, in the order of the model.

    Loading puts parameters into an order of its own, by which `save_pretrained` would split files otherwise.
    """
    model = model_of(kind)
    model.save_pretrained(folder / "fp32", max_shard_size="6KB")
    loaded = type(model).from_pretrained(folder / "fp32", dtype=dtype).state_dict()
    for name, value in model.state_dict(keep_vars=True).items():
        value.data = loaded[name]
    model.save_pretrained(folder / "theirs", max_shard_size="6KB")


def differing(ours: Path, theirs: Path) -> list[str]:
    mine, expected = ({path.name: path.read_bytes() for path in each.glob("model*")} for each in (ours, theirs))
    assert expected
    return sorted(name for name in mine.keys() | expected.keys() if mine.get(name) != expected.get(name))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[core] if "moe" in case or "v3" in case else []) for case in CASES]
)
def test_what_a_class_loads_in_float32_stays_so(case, tmp_path):
    kind, dtype, kept, cast = CASES[case]
    model = model_of(kind)
    save_as_loaded(kind, dtype, tmp_path)
    live = save_checkpoint(model, tmp_path / "live", dtype=dtype, max_shard_size="6KB", fsync=False)
    assert differing(tmp_path / "live", tmp_path / "theirs") == []
    dcp = save(tmp_path / "step-1", model.state_dict())
    for source in (dcp, tmp_path / "fp32"):
        options: Any = {"base_model": tmp_path / "fp32", "dtype": dtype, "max_shard_size": "6KB", "fsync": False}
        stored = export_checkpoint(source, tmp_path / "disk", **options, verify=True)
        assert differing(tmp_path / "disk", tmp_path / "theirs") == []
    dtypes = {name: value.dtype for name, value in Exporter(model, dtype=dtype).tensors()}
    assert dtypes[f"{cast}.weight"] == dtype
    num_kept = sum(each is torch.float32 for each in dtypes.values())
    notes = [note for note in [*live.notes, *stored.notes] if "of float32 kept" in note]
    for folder in ("live", "disk"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    if not kept:
        assert num_kept == len(notes) == 0
        return
    assert dtypes[kept] is torch.float32
    assert [note.partition(" ")[0] for note in notes] == [str(num_kept)] * 2
    assert f"since transformers loads no {str(dtype)[6:]} for them: " in notes[0]


def sharded(model: Any, wrap: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    if wrap == "all":
        for module in reversed(list(model.modules())):
            is_inner = isinstance(module, transformers.PreTrainedModel) and module is not model
            if is_inner or type(module).__name__.endswith("Layer"):
                fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return compiled(model) if wrap == "all" else model


class WithValueHead(nn.Module):
    """A model of transformers inside of another module, next to one that must be cast."""

    def __init__(self, pretrained: nn.Module) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.gate = nn.Linear(16, 1, bias=False)


def test_what_a_class_loads_in_float32_stays_so_when_it_is_sharded(tmp_path):
    """Case F2: `fully_shard` replaces classes, and the router is that of a model within the model."""
    kinds = {"gpt-oss": torch.float16}
    kinds |= {} if IS_4 else {"deepseek-v3": torch.bfloat16, "glm4v-moe": torch.bfloat16}
    for kind, dtype in kinds.items():
        save_as_loaded(kind, dtype, tmp_path / kind)

    def check() -> list[object]:
        wrong: list[object] = []
        for kind, dtype in kinds.items():
            for wrap, gather_all in (("root", False), ("all", True)):
                exporter = Exporter(sharded(model_of(kind), wrap), dtype=dtype, bucket_bytes=700)
                exporter.save(tmp_path / "out", max_shard_size="6KB", fsync=False, gather_all=gather_all)
                wrong += [(kind, wrap, name) for name in differing(tmp_path / "out", tmp_path / kind / "theirs")]
        return wrong

    assert run_ranks(check, 2) == [[]] * 2


@core
def test_only_the_models_of_the_class_that_asks_for_it():
    model = WithValueHead(model_of("deepseek-v3"))
    dtypes = {name: tensor.dtype for name, tensor in Exporter(model, dtype="bf16").tensors()}
    assert dtypes["gate.weight"] == torch.bfloat16
    assert dtypes["pretrained.model.layers.1.mlp.gate.e_score_correction_bias"] is torch.float32


@core
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_merged_model_has_them_too_and_an_adapter_has_none():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_a_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model_of("deepseek-v3"), lora)
    merged = {name: tensor.dtype for name, tensor in Exporter(model, dtype="bf16").tensors()}
    plain = {name: tensor.dtype for name, tensor in Exporter(model_of("deepseek-v3"), dtype="bf16").tensors()}
    assert merged == plain
    adapter = {tensor.dtype for _, tensor in Exporter(model, dtype="bf16", lora="adapter").tensors()}
    assert adapter == {torch.bfloat16}


@core
@pytest.mark.parametrize(
    ("stored", "target", "written"),
    [
        pytest.param(torch.bfloat16, "bf16", torch.bfloat16, id="half-is-not-widened"),
        pytest.param(torch.bfloat16, "fp16", torch.bfloat16, id="nor-made-the-other-half"),
        pytest.param(torch.float64, "bf16", torch.float32, id="double-is-narrowed"),
        pytest.param(torch.bfloat16, "fp32", torch.float32, id="no-half-is-asked-for"),
        pytest.param(torch.bfloat16, "keep", torch.bfloat16, id="nothing-is-asked-for"),
    ],
)
def test_what_is_not_there_in_float32(stored, target, written):
    """`from_pretrained` widens what a file has in half: that makes bytes and no values, so it is left to it."""
    name = "model.layers.1.mlp.gate.weight"
    model = model_of("deepseek-v3").to(stored)
    exported = dict(Exporter(model, dtype=target).tensors())
    assert exported[name].dtype is written
    assert torch.equal(exported[name], model.state_dict()[name].to(written))


class Patterns(nn.Module):
    _keep_in_fp32_modules_strict = ("gate.weight", "experts*scale")
    _keep_in_fp32_modules = ("wo",)


class Patterns5(Patterns):
    def _get_dtype_plan(self) -> None: ...


NAMES = ["mlp.gate.weight", "gate.weights", "experts.scale", "wo.weight", "word.weight", "mlp.gate.bias"]


@pytest.mark.parametrize(
    ("make", "dtype", "expected"),
    [
        (Patterns5, torch.bfloat16, ["mlp.gate.weight", "gate.weights", "experts.scale"]),
        (Patterns5, torch.float16, ["mlp.gate.weight", "gate.weights", "experts.scale", "wo.weight", "word.weight"]),
        (Patterns, torch.bfloat16, ["mlp.gate.weight"]),
        (Patterns, torch.float16, ["mlp.gate.weight", "wo.weight"]),
        (Patterns, torch.float32, []),
        (Patterns, None, []),
        (nn.Identity, torch.bfloat16, []),
    ],
)
def test_names_are_matched_as_the_version_of_transformers_does(
    make: Callable[[], nn.Module], dtype, expected, monkeypatch
):
    """Version 5 searches anywhere, version 4 whole segments, in which `*` repeats a dot."""
    monkeypatch.setattr("fsdp_export.conversion.full_precision.base_twins", lambda model, _: [("", model)])
    found = live_in_fp32(nn.Sequential(make())[0], None, NAMES, None, dtype)
    assert sorted(found) == sorted(expected)


@pytest.mark.skipif(IS_4, reason="transformers 4 does not fuse experts")
def test_patterns_keep_the_dtype_of_names_that_are_written(tmp_path):
    """Names of single experts, of which the model has only all in one tensor."""
    expert = "model.layers.0.mlp.experts.2.*"
    model = model_of("qwen3-moe")
    expected = {
        name: tensor if ".layers.0.mlp.experts.2." in name or name.endswith("norm.weight") else tensor.bfloat16()
        for name, tensor in Exporter(model).tensors()
    }

    def check() -> None:
        exporter = Exporter(sharded(model_of("qwen3-moe"), "all"), dtype="bf16", keep_dtype=[expert, "*norm.weight"])
        tensors = dict(exporter.tensors())
        assert_same({name: tensors.pop(name) for name in expected}, expected)
        assert not tensors
        exporter.save(tmp_path / "out", max_shard_size="6KB", fsync=False)

    run_ranks(check, 2)
    files = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    saved = {name: tensor for file in files for name, tensor in file.items()}
    assert_same({name: saved[name] for name in expected}, expected)
    assert saved.keys() == expected.keys()
