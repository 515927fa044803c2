"""Checkpoints that disagree with their configs and must be refused, with the messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from dcp_folders import save
from hf_folders import write

Maker = Callable[[Path], None]

REFUSED: list[tuple[Maker, str]] = []
"""Makers of a folder with a checkpoint and its config, and the message; `{folder}` stands for the folder."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLAT = "Save with StateDictType.SHARDED_STATE_DICT, or train with fully_shard (FSDP2)."
OTHER_BASE = "Give a --base-model whose config fits, or leave the tensor out with --exclude."


def _refused(message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, message))
        return maker

    return register


def _llama(model_class: str = "LlamaForCausalLM", **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a config as JSON has it, and the tensors of its model."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, **changes})
    return _config_and_tensors(getattr(transformers, model_class)(config))


def _config_and_tensors(model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}, dict(model.state_dict())


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    write(folder, {"model.safetensors": tensors})
    (folder / "config.json").write_text(json.dumps(config, default=str))


@_refused(
    f"what looks like an unflattened FSDP1 shard for {EMBEDDING!r} in {{folder}}: expected (32, 16) as "
    f"{{folder}}/config.json has it, found (132,). {FLAT}"
)
def flat_embedding(folder: Path) -> None:
    """A fourth of what FSDP1 flattens together: the embedding and the norm behind it."""
    config, tensors = _llama(tie_word_embeddings=True)
    del tensors[HEAD]
    save(folder, {**tensors, EMBEDDING: torch.zeros((32 * 16 + 16) // 4)})
    (folder / "config.json").write_text(json.dumps(config, default=str))


@_refused(
    "what looks like an unflattened FSDP1 shard for 'model.layers.0.mlp.down_proj.weight' in {folder}: expected "
    f"(16, 24) as {{folder}}/config.json has it, found (384,), and 2 more that disagree. {FLAT}"
)
def flat_weights_of_one_rank(folder: Path) -> None:
    config, tensors = _llama()
    flat = {f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj")}
    tensors = {name: tensor.flatten() if name in flat else tensor for name, tensor in tensors.items()}
    _write(folder, config, {**tensors, "model.norm.weight": torch.zeros(0)})


@_refused(
    "a shape that disagrees with the config for 'model.layers.0.mlp.down_proj.weight' in {folder}: expected (16, 20) "
    f"as {{folder}}/config.json has it, found (16, 24), and 2 more that disagree. {OTHER_BASE}"
)
def another_models_config(folder: Path) -> None:
    config, tensors = _llama()
    _write(folder, {**config, "intermediate_size": 20}, tensors)


@_refused(
    "a shape that disagrees with the config for 'transformer.h.0.attn.c_attn.weight' in {folder}: expected (16, 48) "
    f"as {{folder}}/config.json has it, found (48, 16). {OTHER_BASE}"
)
def transposed_weight(folder: Path) -> None:
    """GPT-2 keeps its weights as `(in, out)`."""
    sizes = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    config, tensors = _config_and_tensors(transformers.GPT2LMHeadModel(sizes))
    name = "transformer.h.0.attn.c_attn.weight"
    _write(folder, config, {**tensors, name: tensors[name].T})


@_refused(
    "a shape that disagrees with the config for 'score.weight' in {folder}: expected (2, 16) as {folder}/config.json "
    f"has it, found (1, 16). {OTHER_BASE}"
)
def another_number_of_labels(folder: Path) -> None:
    config, tensors = _llama("LlamaForTokenClassification")
    _write(folder, config, {**tensors, "score.weight": torch.zeros(1, 16)})


@_refused(
    f"a vocabulary that does not fit the config for {EMBEDDING!r} in {{folder}}: expected 32 rows, the vocab_size of "
    f"{{folder}}/config.json, found 40, but 32 of {HEAD!r}. {OTHER_BASE}"
)
def half_resized_vocabulary(folder: Path) -> None:
    config, tensors = _llama()
    _write(folder, config, {**tensors, EMBEDDING: torch.zeros(40, 16)})


@_refused(
    f"a vocabulary that does not fit the config for {HEAD!r} in {{folder}}: expected 32 rows, the vocab_size of "
    f"{{folder}}/config.json, found 48, but 40 of {EMBEDDING!r}. {OTHER_BASE}"
)
def vocabulary_of_two_other_sizes(folder: Path) -> None:
    config, tensors = _llama()
    _write(folder, config, {**tensors, EMBEDDING: torch.zeros(40, 16), HEAD: torch.zeros(48, 16)})


@_refused(
    f"a vocabulary that does not fit the config for {HEAD!r} in {{folder}}: expected 32 rows, the vocab_size of "
    f"{{folder}}/config.json, found 8. {OTHER_BASE}"
)
def vocabulary_without_the_token_for_padding(folder: Path) -> None:
    """No model can be built of a config with this token and so few rows."""
    config, tensors = _llama(pad_token_id=20)
    _write(folder, config, {**tensors, EMBEDDING: torch.zeros(8, 16), HEAD: torch.zeros(8, 16)})


@_refused(
    "a shape that disagrees with the config for 'model.norm.weight' in {folder}: expected (16,) as "
    f"{{folder}}/config.json has it, found (24,), and 2 more that disagree. {OTHER_BASE}"
)
def resized_vocabulary_and_more(folder: Path) -> None:
    config, tensors = _llama()
    resized = {EMBEDDING: torch.zeros(40, 16), HEAD: torch.zeros(40, 16)}
    _write(folder, config, {**tensors, **resized, "model.norm.weight": torch.zeros(24)})
