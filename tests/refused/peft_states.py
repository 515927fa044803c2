"""State dicts of PEFT models that cannot be merged, with the messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_export.errors import ExportError, SourceError, UsageError

Maker = Callable[[Path], None]

REFUSED: list[tuple[Maker, type[ExportError], str]] = []
"""Makers, which fill a folder; the error; and its message."""

_LAYER = "base_model.model.model.layers.0"
_Q = f"{_LAYER}.self_attn.q_proj"
_ALONE = "the adapter alone (--lora adapter, lora='adapter')."
_CONFIG = "Put the adapter_config.json of the training beside the checkpoint"
_KEEP = "or keep the names that the tensors have with --lora keep."


def _refused(error: type[ExportError], message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, error, message))
        return maker

    return register


def _state(module: str = _Q, weight: str = "base_layer.weight", adapter: str = "default") -> dict[str, torch.Tensor]:
    return {
        f"{module}.{weight}": torch.ones(5, 6),
        f"{module}.lora_A.{adapter}.weight": torch.ones(2, 6),
        f"{module}.lora_B.{adapter}.weight": torch.ones(5, 2),
        "base_model.model.model.norm.weight": torch.ones(6),
    }


def _save(folder: Path, tensors: dict[str, torch.Tensor], **values: Any) -> None:
    torch.save(tensors, folder / "pytorch_model_fsdp.bin")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **values}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@_refused(
    SourceError,
    "an adapter whose lora_alpha is not known in {folder}: expected adapter_config.json or lora_train_meta.json there "
    f"or above it, found neither. {_CONFIG}, {_KEEP}",
)
def without_lora_alpha(folder: Path) -> None:
    _save(folder, _state())
    (folder / "adapter_config.json").unlink()


@_refused(
    SourceError,
    f"an adapter config that is not that of the tensors for '{_Q.removeprefix('base_model.model.')}' in "
    "{folder}/adapter_config.json: expected rank 2, found rank 8. Move it away and put the right one beside the "
    f"checkpoint, {_KEEP}",
)
def a_config_of_another_rank(folder: Path) -> None:
    _save(folder, _state(), r=8)


@_refused(
    SourceError,
    "an adapter of a kind that is not exported in {folder}: expected LoRA or DoRA of PEFT, found "
    f"{_Q}.ia3_l.default. Keep the names that the tensors have with --lora keep.",
)
def ia3(folder: Path) -> None:
    _save(folder, {f"{_Q}.base_layer.weight": torch.ones(5, 6), f"{_Q}.ia3_l.default": torch.ones(6, 1)})


@_refused(
    SourceError,
    "an adapter of a kind that is not exported in {folder}: expected LoRA or DoRA of PEFT, found "
    f"{_LAYER}.mlp.up_proj.base_layer.weight. Keep the names that the tensors have with --lora keep.",
)
def a_base_layer_without_an_adapter(folder: Path) -> None:
    _save(folder, {**_state(), f"{_LAYER}.mlp.up_proj.base_layer.weight": torch.ones(5, 6)})


@_refused(
    SourceError,
    "an adapter of a kind that is not exported in {folder}: expected LoRA or DoRA of PEFT, found "
    "base_model.model.embed_tokens.token_adapter.trainable_tokens_delta.default. Keep the names that the tensors have "
    "with --lora keep.",
)
def trained_tokens(folder: Path) -> None:
    embedding = "base_model.model.embed_tokens.token_adapter"
    tokens = {f"{embedding}.base_layer.weight": torch.ones(9, 6)}
    _save(folder, {**_state(), **tokens, f"{embedding}.trainable_tokens_delta.default": torch.ones(1, 6)})


@_refused(
    UsageError,
    "several adapters in {folder}: expected one, or one called default, found one, two. Save a state dict that has "
    "only the one that is meant.",
)
def several_adapters(folder: Path) -> None:
    _save(folder, {**_state(adapter="one"), **_state(adapter="two")})


@_refused(
    SourceError,
    f"a quantized weight, into which LoRA cannot be merged, for '{_Q}.base_layer.weight' in {{folder}}: expected "
    f"float32, bfloat16 or float16, found uint8. Take {_ALONE}",
)
def four_bits(folder: Path) -> None:
    _save(folder, {**_state(), f"{_Q}.base_layer.weight": torch.ones(15, 1, dtype=torch.uint8)})


@_refused(
    SourceError,
    f"a quantized weight, into which LoRA cannot be merged, for '{_Q}.base_layer.weight' in {{folder}}: expected "
    f"float32, bfloat16 or float16, found float8_e4m3fn. Take {_ALONE}",
)
def fp8(folder: Path) -> None:
    _save(folder, {**_state(), f"{_Q}.base_layer.weight": torch.ones(5, 6).to(torch.float8_e4m3fn)})


@_refused(
    SourceError,
    f"matrices of LoRA that fit no weight for '{_LAYER}.mlp.experts.lora_A.default.weight' in {{folder}}: expected a "
    f"weight of model.layers.0.mlp.experts, found none. Take {_ALONE}",
)
def mxfp4_experts(folder: Path) -> None:
    experts = _state(f"{_LAYER}.mlp.experts", "base_layer.gate_up_proj_blocks")
    experts[f"{_LAYER}.mlp.experts.base_layer.gate_up_proj_blocks"] = torch.ones(2, 5, 3, 16, dtype=torch.uint8)
    experts[f"{_LAYER}.mlp.experts.base_layer.gate_up_proj_scales"] = torch.ones(2, 5, 3, dtype=torch.uint8)
    _save(folder, experts, target_parameters=["experts.gate_up_proj"])


@_refused(
    SourceError,
    f"matrices of LoRA that do not fit the weight for '{_Q}.base_layer.weight' in {{folder}}: expected [5, 7], found A "
    f"[2, 6] and B [5, 2]. Use a checkpoint whose tensors belong together, or: take {_ALONE}",
)
def a_weight_of_another_shape(folder: Path) -> None:
    _save(folder, {**_state(), f"{_Q}.base_layer.weight": torch.ones(5, 7)})


@_refused(
    SourceError,
    f"matrices of LoRA that do not fit the weight for '{_Q}.base_layer.weight' in {{folder}}: expected [5, 6], found A "
    f"[0, 6] and B [5, 0]. Use a checkpoint whose tensors belong together, or: take {_ALONE}",
)
def a_rank_of_zero(folder: Path) -> None:
    empty = {f"{_Q}.lora_A.default.weight": torch.ones(0, 6), f"{_Q}.lora_B.default.weight": torch.ones(5, 0)}
    _save(folder, {**_state(), **empty}, r=0)


@_refused(
    SourceError,
    f"norms of DoRA that do not fit the weight for '{_Q}.lora_magnitude_vector.default.weight' in {{folder}}: expected "
    f"5 numbers, found [4]. Use a checkpoint whose tensors belong together, or: take {_ALONE}",
)
def norms_of_another_shape(folder: Path) -> None:
    _save(folder, {**_state(), f"{_Q}.lora_magnitude_vector.default.weight": torch.ones(4)}, use_dora=True)


@_refused(
    SourceError,
    f"a bias of an adapter for a module that has none for '{_Q}.lora_B.default.bias' in {{folder}}: expected "
    f"{_Q}.base_layer.bias, found none. Take {_ALONE}",
)
def a_bias_for_none(folder: Path) -> None:
    _save(folder, {**_state(), f"{_Q}.lora_B.default.bias": torch.ones(5)}, lora_bias=True)


@_refused(
    SourceError,
    f"half of an adapter for '{_Q}.lora_A.weight' in {{folder}}: expected lora_B, found only lora_A. Use a checkpoint "
    "that has both.",
)
def half_of_an_adapter(folder: Path) -> None:
    state = _state()
    del state[f"{_Q}.lora_B.default.weight"]
    _save(folder, state)


@_refused(
    SourceError,
    f"a kind of LoRA that cannot be merged in {{folder}}: found arrow_config in its config. Take {_ALONE}",
)
def arrow(folder: Path) -> None:
    _save(folder, _state(), arrow_config={"top_k": 2})


@_refused(
    SourceError,
    "a pattern in alpha_pattern that is not tried, for it may never end, for 'model.layers.0.self_attn.q_proj' in "
    f"{{folder}}: found '(.*q)*x'. Take {_ALONE}",
)
def a_pattern_that_may_never_end(folder: Path) -> None:
    _save(folder, _state(), alpha_pattern={"(.*q)*x": 3})


@_refused(
    SourceError,
    f"an alpha that is no number for 'model.layers.0.self_attn.q_proj' in {{folder}}: found much. Take {_ALONE}",
)
def an_alpha_in_words(folder: Path) -> None:
    _save(folder, _state(), alpha_pattern={"q_proj": "much"})


@_refused(
    SourceError,
    "experts of whose weights the shape does not tell whether they are transposed for "
    f"'{_LAYER}.mlp.experts.base_layer.down_proj' in {{folder}}: found [2, 6, 6]. Give the config of the model "
    f"(--base-model), or: take {_ALONE}",
)
def square_experts_without_a_config(folder: Path) -> None:
    module = f"{_LAYER}.mlp.experts"
    experts = {
        f"{module}.base_layer.down_proj": torch.ones(2, 6, 6),
        f"{module}.lora_A.default.weight": torch.ones(4, 6),
        f"{module}.lora_B.default.weight": torch.ones(6, 4),
    }
    _save(folder, experts, target_parameters=["experts.down_proj"])


@_refused(
    SourceError,
    f"matrices of LoRA that fit several weights for '{_LAYER}.mlp.experts.lora_A.default.weight' in {{folder}}: "
    f"expected a weight of model.layers.0.mlp.experts, found {_LAYER}.mlp.experts.base_layer.gate_proj, "
    f"{_LAYER}.mlp.experts.base_layer.up_proj. Take {_ALONE}",
)
def experts_that_all_fit(folder: Path) -> None:
    module = f"{_LAYER}.mlp.experts"
    experts = {
        f"{module}.base_layer.gate_proj": torch.ones(2, 5, 6),
        f"{module}.base_layer.up_proj": torch.ones(2, 5, 6),
        f"{module}.lora_A.default.weight": torch.ones(4, 6),
        f"{module}.lora_B.default.weight": torch.ones(5, 4),
    }
    _save(folder, experts, target_parameters=["experts.up_proj"])


@_refused(
    SourceError,
    "two keys become one name for 'model.norm.weight' in {folder}: found 'base_model.model.model.norm.weight' and "
    "'model.norm.weight'. Save the state dict of one model.",
)
def a_weight_twice(folder: Path) -> None:
    _save(folder, {**_state(), "model.norm.weight": torch.ones(6)})
