"""Tiny models of many families: all that transformers does to names and tensors as it saves is done to one of these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

TEXT: dict[str, Any] = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 1,
}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 10000.0}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

_TURNED = ("experts.gate_up_proj", "experts.down_proj")


def _text(name: str, suffix: str = "ForCausalLM", **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**{**TEXT, **changes})
        return getattr(transformers, name + suffix)(config)

    return make


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=33, n_embd=16, n_layer=2, n_head=2, n_positions=24)
    return transformers.GPT2LMHeadModel(config)


def _t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 33}
    config: Any = transformers.T5Config
    return transformers.T5ForConditionalGeneration(config(decoder_start_token_id=0, **sizes))


def _dinov2() -> Any:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return transformers.Dinov2Model(transformers.Dinov2Config(use_swiglu_ffn=True, **sizes))


def _qwen_vl(name: str) -> Callable[[], Any]:
    def make() -> Any:
        width = (
            {"embed_dim": 16, "hidden_size": 16} if name == "Qwen2VL" else {"hidden_size": 16, "out_hidden_size": 16}
        )
        extra: Any = {} if name == "Qwen2VL" else {"intermediate_size": 24, "fullatt_block_indexes": [1]}
        vision: Any = {**_QWEN_VISION, **width, **extra}
        text = {**TEXT, "rope_scaling": _ROPE}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def _llava() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    config = transformers.LlavaConfig(text_config={"model_type": "llama", **TEXT}, vision_config=vision)
    return transformers.LlavaForConditionalGeneration(config)


def _qwen3_vl_moe() -> Any:
    vision: Any = {**_QWEN_VISION, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text = {**TEXT, **_EXPERTS, "moe_intermediate_size": 12, "rope_scaling": {**_ROPE, "mrope_section": [1, 1, 0]}}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _gemma3() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


HUB_MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": _text("Qwen2"),
    "qwen3": _text("Qwen3"),
    "llama": _text("Llama"),
    "llama-tied": _text("Llama", tie_word_embeddings=True),
    "gemma2": _text("Gemma2"),
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "mistral": _text("Mistral"),
    "mixtral": _text("Mixtral", **_LOCAL),
    "qwen3-moe": _text("Qwen3Moe", **_EXPERTS),
    "deepseek-v3": _text("DeepseekV3", **{**_DEEPSEEK, "num_key_value_heads": 4}),
    "gpt-oss": _text("GptOss", **_LOCAL),
    "qwen3-next": _text("Qwen3Next", **_EXPERTS, **_LINEAR),
    "phimoe": _text("Phimoe", **_LOCAL),
    "qwen2-vl": _qwen_vl("Qwen2VL"),
    "qwen2.5-vl": _qwen_vl("Qwen2_5_VL"),
    "llava": _llava,
    "qwen3-vl-moe": _qwen3_vl_moe,
    "dinov2": _dinov2,
    "t5": _t5,
    "classifier": _text("Qwen3", "ForSequenceClassification", num_labels=1),
}


def hub_model(kind: str) -> Any:
    """Return a model with weights from a seed."""
    torch.manual_seed(0)
    return HUB_MODELS[kind]()


def save_as_hub(model: Any, folder: str | Path) -> None:
    """Save a model as the hub has it, which transformers 5 changes as it loads it: here what a config does not tell."""
    file = Path(folder, "model.safetensors")
    model.save_pretrained(folder)
    tensors = load_file(file)
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()}
    for name in [name for name in named if ".language_model." in name and name.endswith(_TURNED)]:
        named[name] = named[name].transpose(1, 2).contiguous()
    save_file(named, file, metadata={"format": "pt"})


def trained(model: Any) -> Any:
    """Give a model values as large as those of trained ones, of which no two are the same."""
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.normal_(std=0.5)
    return model


def logits_of(model: Any) -> torch.Tensor:
    """Return what a model makes of one short input."""
    tokens = torch.tensor([[5, 3, 8, 13, 2]])
    inputs: dict[str, torch.Tensor] = {"input_ids": tokens}
    if model.config.model_type == "dinov2":
        inputs = {"pixel_values": torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)}
    if model.config.model_type == "t5":
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        output: torch.Tensor = model.eval()(**inputs)[0]
    return output
