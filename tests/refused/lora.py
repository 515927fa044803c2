"""Adapters that must be refused, with the messages."""

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

_LAYER = "base_model.model.model.layers.0.self_attn"
_ANOTHERS = (
    "Move it away and put the right one beside the checkpoint, or write the tensors alone with --format safetensors."
)
_PUT_IT = (
    "Put the adapter_config.json of the training beside the checkpoint, or write the tensors alone with --format "
    "safetensors."
)


def _refused(error: type[ExportError], message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, error, message))
        return maker

    return register


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model_fsdp.bin")


def _pair(module: str = "q_proj", adapter: str = "", rank: int = 2) -> dict[str, torch.Tensor]:
    return {
        f"{_LAYER}.{module}.lora_A{adapter}.weight": torch.ones(rank, 6),
        f"{_LAYER}.{module}.lora_B{adapter}.weight": torch.ones(5, rank),
    }


def _configured(folder: Path, **values: Any) -> None:
    _save(folder, _pair())
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **values}
    (folder / "lora_adapter").mkdir()
    (folder / "lora_adapter" / "adapter_config.json").write_text(json.dumps(config))


@_refused(
    SourceError,
    "an adapter whose lora_alpha is not known in {folder}: expected adapter_config.json or lora_train_meta.json there "
    f"or above it, found neither. {_PUT_IT}",
)
def without_lora_alpha(folder: Path) -> None:
    _save(folder, _pair())


@_refused(
    SourceError,
    "an adapter whose lora_alpha is not known in {folder}: expected adapter_config.json or lora_train_meta.json there "
    "or above it, found {folder}/lora_adapter/adapter_config.json with None, {folder}/lora_train_meta.json with 0. "
    f"{_PUT_IT}",
)
def with_a_lora_alpha_of_zero(folder: Path) -> None:
    _configured(folder, lora_alpha=None)
    (folder / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 0, "task_type": "CAUSAL_LM"}')


@_refused(
    SourceError,
    "an adapter config that is not that of the tensors for 'model.layers.0.self_attn.q_proj' in "
    "{folder}/lora_adapter/adapter_config.json: expected rank 2, found rank 16, 8. " + _ANOTHERS,
)
def with_a_config_of_other_ranks(folder: Path) -> None:
    _configured(folder, r=8, rank_pattern={"k_proj": 16})


@_refused(
    SourceError,
    "an adapter config that is not that of the tensors for 'model.layers.0.self_attn.q_proj' in "
    "{folder}/lora_train_meta.json: expected rank 2, found rank 8. " + _ANOTHERS,
)
def with_a_record_of_another_rank(folder: Path) -> None:
    _save(folder, _pair())
    (folder / "lora_train_meta.json").write_text('{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}')


@_refused(
    SourceError,
    "an adapter config that is not that of the tensors for 'model.layers.0.self_attn.q_proj' in "
    "{folder}/lora_adapter/adapter_config.json: found targets k_proj, proj. " + _ANOTHERS,
)
def with_a_config_of_other_modules(folder: Path) -> None:
    _configured(folder, target_modules=["proj", "k_proj"])


@_refused(
    SourceError,
    "an adapter config of another kind in {folder}/lora_adapter/adapter_config.json: expected peft_type LORA, found "
    "OFT. " + _ANOTHERS,
)
def with_a_config_of_another_kind(folder: Path) -> None:
    _configured(folder, peft_type="OFT")


@_refused(
    SourceError,
    "a config that cannot be read in {folder}/adapter_config.json: expected a JSON object, found list",
)
def with_a_config_that_is_none(folder: Path) -> None:
    _save(folder, _pair())
    (folder / "adapter_config.json").write_text("[]")


@_refused(
    SourceError,
    "an adapter of fused experts, which only its config explains, for 'model.layers.0.mlp.experts' in {folder}: "
    f"expected adapter_config.json. {_PUT_IT}",
)
def fused_experts(folder: Path) -> None:
    experts = "base_model.model.model.layers.0.mlp.experts"
    inner = {
        f"{experts}.base_layer.lora_A.weight": torch.ones(4, 6),
        f"{experts}.base_layer.lora_B.weight": torch.ones(3, 4),
    }
    outer = {f"{experts}.lora_A.weight": torch.ones(4, 3), f"{experts}.lora_B.weight": torch.ones(6, 4)}
    _save(folder, {**outer, **inner})
    (folder / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 16}')


@_refused(
    SourceError,
    "half of an adapter for 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' in {folder}: expected "
    "lora_B, found only lora_A. Use a checkpoint that has both.",
)
def only_one_matrix(folder: Path) -> None:
    _save(folder, {f"{_LAYER}.q_proj.lora_A.weight": torch.ones(2, 6)})


@_refused(
    SourceError,
    "half of an adapter for 'base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector' in {folder}: "
    "expected lora_A and lora_B. Use a checkpoint that has both.",
)
def only_a_magnitude(folder: Path) -> None:
    _save(folder, {f"{_LAYER}.q_proj.lora_magnitude_vector.default.weight": torch.ones(5)})


@_refused(
    SourceError,
    "matrices of an adapter that do not fit for 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' in "
    "{folder}: expected as many rows as the other has columns, found [12] and [5, 2]. Save full tensors, or DTensors.",
)
def flattened(folder: Path) -> None:
    tensors = _pair()
    name = f"{_LAYER}.q_proj.lora_A.weight"
    _save(folder, {**tensors, name: tensors[name].flatten()})


@_refused(
    SourceError,
    "an adapter of a kind that is not exported in {folder}: expected LoRA or DoRA of PEFT, found "
    "base_model.model.model.layers.0.self_attn.q_proj.lora_E.default. Save it with PEFT's save_pretrained.",
)
def adalora(folder: Path) -> None:
    _save(folder, {**_pair(adapter=".default"), f"{_LAYER}.q_proj.lora_E.default": torch.ones(2, 1)})


@_refused(
    UsageError,
    "several adapters in {folder}: expected one, or one called default, found one, two. Save a state dict that has "
    "only the one that is meant.",
)
def several_adapters(folder: Path) -> None:
    _save(folder, {**_pair(adapter=".one"), **_pair(adapter=".two")})


@_refused(
    SourceError,
    "two keys become one name for 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' in {folder}: found "
    "'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' and "
    "'base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight'. Save the state dict of one model.",
)
def an_adapter_twice(folder: Path) -> None:
    _save(folder, {**_pair(), **_pair(adapter=".default")})
