"""Models that PEFT has changed, one for each way in which it puts LoRA on a weight, and what it merges them to."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from models import hf_model
from peft import LoraConfig
from torch import nn

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES: dict[str, Any] = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Convolutions(nn.Module):
    """Convolutions of all dims, a bare matrix, and a linear layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(18, 21, 3)
        self.two = nn.Conv2d(18, 21, (3, 2))
        self.flat = nn.Conv2d(17, 33, 1)
        self.three = nn.Conv3d(6, 7, 2)
        self.linear = nn.Linear(19, 23)
        self.inner = nn.Module()
        self.inner.matrix = nn.Parameter(torch.randn(20, 18))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions()


def llama(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=44, num_key_value_heads=2, tie_word_embeddings=tied, attention_bias=True
    )
    return transformers.LlamaForCausalLM(config)


def qwen3_moe() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=40, moe_intermediate_size=24, num_experts=4, num_key_value_heads=2
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    """Its experts are transposed, and one of them is square, so that the shape does not tell."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=32, num_local_experts=3, num_key_value_heads=2, head_dim=8
    )
    return transformers.GptOssForCausalLM(config)


def gpt2() -> nn.Module:
    return hf_model("gpt2")


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (llama, {"r": 4, "lora_alpha": 12, "target_modules": [*ATTENTION, "up_proj", "lm_head"]}),
    "rslora": (llama, {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ATTENTION}),
    "patterns": (
        llama,
        {
            "r": 2,
            "lora_alpha": 7,
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"k_proj": 5, r"^model\.layers\.1\.self_attn\.q_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.v_proj": 11, "down_proj": 3},
        },
    ),
    "embeddings": (llama, {"r": 4, "lora_alpha": 12, "target_modules": ["embed_tokens", "q_proj"]}),
    "dora": (llama, {"r": 4, "lora_alpha": 9, "use_dora": True, "target_modules": [*ATTENTION, "embed_tokens"]}),
    "saved": (llama, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "lora-bias": (llama, {"r": 4, "target_modules": ATTENTION, "lora_bias": True}),
    "biases": (llama, {"r": 4, "target_modules": ["q_proj"], "bias": "all"}),
    "tokens": (llama, {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [0, 5, 66]}),
    "gpt2": (gpt2, {"r": 4, "lora_alpha": 9, "target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "gpt2-dora": (gpt2, {"r": 4, "use_dora": True, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "convolutions": (
        convolutions,
        {
            "r": 4,
            "lora_alpha": 9,
            "target_modules": ["one", "two", "flat", "three", "linear"],
            "target_parameters": ["inner.matrix"],
        },
    ),
    "convolutions-dora": (
        convolutions,
        {"r": 4, "use_dora": True, "target_modules": ["one", "two", "flat", "three", "linear"]},
    ),
    "experts": (qwen3_moe, {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "down-experts": (qwen3_moe, {"r": 2, "target_modules": ["k_proj"], "target_parameters": EXPERTS[1:]}),
    "transposed-experts": (gpt_oss, {"r": 4, "lora_alpha": 9, "target_modules": [], "target_parameters": EXPERTS}),
}
"""Makers of base models, and of what PEFT is told."""


def with_lora(kind: str, dtype: torch.dtype = torch.float32, adapter: str = "default") -> Any:
    """Return a model with an adapter whose numbers are all drawn, the same at every call."""
    make, options = MODELS[kind]
    with quiet():
        base: Any = make().to(dtype)
        model = peft.get_peft_model(base, LoraConfig(**options), adapter_name=adapter)
    draw(model)
    return model.eval()


def draw(model: nn.Module, seed: int = 1) -> None:
    """Give all that is trained other numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                drawn = torch.rand(parameter.shape, generator=generator) * 0.3 - 0.1
                parameter.copy_(parameter + drawn)


def merged(model: Any) -> Any:
    """Return what PEFT merges a copy of a model to."""
    with quiet():
        return copy.deepcopy(model).merge_and_unload()


def merged_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of what PEFT merges a copy of a model to, all under the names that transformers saves."""
    base = merged(model)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 converts none of these
        return dict(base.state_dict())
    is_known = isinstance(base, transformers.PreTrainedModel)
    return dict(revert_weight_conversion(base, base.state_dict()) if is_known else base.state_dict())


@contextmanager
def quiet() -> Iterator[None]:
    """Let PEFT warn of what it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
