"""Models that vLLM and transformers both have: made small, saved, and loaded by vLLM on the CPU."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hub_models import hub_model, save_as_hub, trained

TURNED = "qwen3-vl-moe"
TIED = {"llama-tied", "gemma2", "gemma3"}

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


def prepare(cache: Path) -> None:
    """Set what vLLM needs to run here, before its first import."""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_CACHE_ROOT=str(cache), VLLM_LOGGING_LEVEL="ERROR")
    _describe_operators()


@functools.cache
def _describe_operators() -> None:
    if not torch.version.cuda:
        # torchvision's operators are built for CUDA. Nothing here calls them, but its import describes them.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


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


@contextmanager
def loaded(folder: Path, dtype: str = "float32") -> Iterator[tuple[Any, Any]]:
    """Load a folder as `vllm serve` does; yield the model, with its weights as they came in, and the config."""
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
            names = model.load_weights(
                DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model)
            )
            assert names >= {name for name, _ in model.named_parameters()}
            yield model, config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def load(folder: Path, dtype: str = "float32") -> Any:
    """Load a folder; return the model with its weights as they came in."""
    with loaded(folder, dtype) as (model, _):
        return model


def parts_of(kind: str, name: str) -> list[str]:
    """Return what a parameter of vLLM is made of, in the names of transformers."""
    for theirs, ours in {**NAMES.get(kind, {}), **EXPERTS}.items():
        name = name.replace(theirs, ours)
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def assert_arrived(
    kind: str, parameters: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> None:
    """Compare every parameter with what it is made of, bit by bit, and see that nothing is left."""
    left = set(expected)
    for name, parameter in parameters:
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
