"""vLLM's own models and its own loader read what was exported, on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import save
from hub_models import hub_model, save_as_hub, trained
from models import shard
from ranks import run_ranks
from torch import nn
from transformers.utils import logging

from fsdp_export import Exporter, export_checkpoint

KINDS = ["qwen3", "qwen3-moe", "llama", "llama-tied", "qwen2", "mistral", "mixtral", "gemma2", "deepseek-v3", "gpt-oss"]
KINDS += ["qwen3-next", "qwen2.5-vl", "gemma3"]
TURNED = "qwen3-vl-moe"
TIED = {"llama-tied", "gemma2", "gemma3"}
IN_BF16 = ["qwen3", "qwen3-moe", "llama-tied"]

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32}
"""Multiples of 32: what vLLM has for experts on a CPU takes no others."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""The linear layers that vLLM makes one."""

EXPERTS = {
    "experts.routed_experts.w13_": "experts.gate_up_proj_",
    "experts.routed_experts.w2_": "experts.down_proj_",
    "_proj_weight": "_proj",
}
VISION = {"language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model."}
NAMES = {
    "mixtral": {"block_sparse_moe.": "mlp."},
    "gpt-oss": {".attn.": ".self_attn.", ".embedding.": ".embed_tokens."},
    "qwen2.5-vl": VISION | {"visual.": "model.visual."},
    TURNED: VISION | {"visual.": "model.visual."},
    "gemma3": VISION
    | {"vision_tower.vision_model.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
}
"""What vLLM calls otherwise than transformers does."""


def make_base(kind: str, folder: Path) -> None:
    """Save the model that is trained, as the hub would have it."""
    model = hub_model(kind)
    config = model.config.get_text_config()
    if config is model.config:
        config.update(SIZES)
    elif kind == "gemma3":
        model.config.vision_config.vision_use_head = False
    elif kind == TURNED:
        config.update({"hidden_size": 64, "moe_intermediate_size": 96})
        model.config.vision_config.out_hidden_size = 64
    # What the hub's configs have, and the classes of transformers 5 do not know.
    config.update({"norm_topk_prob": True, "topk_method": "noaux_tc"})
    save_as_hub(type(model)(model.config), folder / kind / "base")


def from_base(kind: str, folder: Path) -> Any:
    return type(hub_model(kind)).from_pretrained(folder / kind / "base")


def new(kind: str, folder: Path) -> Any:
    """Return a model that was loaded and trained."""
    return trained(from_base(kind, folder))


def save_all(folder: Path) -> None:
    """Export every model from two ranks, and save it by DCP."""
    for kind in [*KINDS, TURNED]:
        model = shard(new(kind, folder), "1d", 2)
        Exporter(model).save(folder / kind / "live", max_shard_size="20KB", fsync=False)
        save(folder / kind / "step-1", {"model": model.state_dict(), "step": 1})
        if kind in IN_BF16:
            Exporter(model, dtype=torch.bfloat16).save(folder / kind / "bfloat16", fsync=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("saved")
    for kind in [*KINDS, TURNED]:
        make_base(kind, folder)
        new(kind, folder)  # what transformers imports for it, here once for all ranks
    run_ranks(save_all, 2, folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("cache")
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_CACHE_ROOT=str(cache), VLLM_LOGGING_LEVEL="ERROR")
    if not torch.version.cuda:
        # torchvision's operators are built for CUDA. Nothing here calls them, but its import describes them.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def load(folder: Path, dtype: str = "float32") -> Any:
    """Load a folder as `vllm serve` does; return the model with its weights as they came in."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    # Or a process is started to see what the class can do.
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    arguments: Any = {"model": str(folder), "dtype": dtype, "max_model_len": 16, "skip_tokenizer_init": True}
    config = EngineArgs(**arguments, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        parallel_state.initialize_model_parallel()
        try:
            model = initialize_model(config)
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
            loaded = model.load_weights(
                DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model)
            )
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
    assert loaded >= {name for name, _ in model.named_parameters()}
    return model


def parts_of(kind: str, name: str) -> list[str]:
    """Return what a parameter of vLLM is made of, in the names of transformers."""
    for theirs, ours in {**NAMES.get(kind, {}), **EXPERTS}.items():
        name = name.replace(theirs, ours)
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def assert_arrived(kind: str, model: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Compare every parameter with what it is made of, bit by bit, and see that nothing is left."""
    left = set(expected)
    for name, parameter in model.named_parameters():
        parts = parts_of(kind, name)
        left.difference_update(parts)
        value = torch.cat([expected[part] for part in parts])
        if kind == "gpt-oss" and name.endswith(("w13_weight", "w2_weight")):
            value = value.transpose(1, 2)
        # Embeddings have rows for more tokens than there are.
        assert parameter.dtype == value.dtype, name
        assert torch.equal(parameter[: len(value)], value), name
        assert not parameter[len(value) :].any(), name
    assert left == ({"lm_head.weight"} if kind in TIED else set())


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_exported_arrives(kind, saved):
    assert (saved / kind / "live" / "model.safetensors.index.json").exists()
    assert_arrived(kind, load(saved / kind / "live"), new(kind, saved).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_exported_from_a_dcp_folder_arrives(kind, saved, tmp_path):
    export_checkpoint(saved / kind / "step-1", tmp_path / "out", base_model=saved / kind / "base", fsync=False)
    assert_arrived(kind, load(tmp_path / "out"), new(kind, saved).state_dict())


@pytest.mark.parametrize("kind", IN_BF16)
def test_what_was_cast_arrives_in_the_dtype_of_the_config(kind, saved):
    expected = new(kind, saved).to(torch.bfloat16).state_dict()
    assert_arrived(kind, load(saved / kind / "bfloat16", "auto"), expected)


def test_tied_embeddings_are_tied_until_they_differ(saved, tmp_path):
    model = new("llama-tied", saved)
    loaded = load(saved / "llama-tied" / "live")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    Exporter(model).save(tmp_path / "out", fsync=False)
    assert_arrived("llama", load(tmp_path / "out"), model.state_dict())


def test_experts_that_transformers_does_not_turn_back_are_refused(saved):
    """Transformers 5 transposes them as it loads them from the hub, and does not as it saves them."""
    assert_arrived(TURNED, load(saved / TURNED / "base"), from_base(TURNED, saved).state_dict())
    with pytest.raises(RuntimeError, match="size of tensor a"):
        load(saved / TURNED / "live")
