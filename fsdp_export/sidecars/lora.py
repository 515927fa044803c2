"""The `adapter_config.json` of a LoRA adapter: the file that is found for it, or one that is made of its tensors.

What tensors do not tell, `lora_alpha` above all, has to be found: without it they are worth nothing, and a guess would
load without an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..config_json import Edits, edit_json
from ..conversion.live_twin import model_class
from ..conversion.peft import LoraAdapter, parents
from ..conversion.peft_names import is_embedding
from ..errors import SourceError, listing
from ..paths import is_folder
from .of_folder import origin_in, read_config
from .origins import CONFIG, GENERATION_CONFIG, levels
from .sidecar import Origin, Sidecar, Sidecars, changed_keys

__all__ = ["ADAPTER_CONFIG", "live_lora_sidecars", "lora_config", "lora_sidecars"]

ADAPTER_CONFIG = "adapter_config.json"

_VERL_META = "lora_train_meta.json"
_VERL_FOLDER = "lora_adapter"
_TASKS = {"CAUSAL_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS"}
_PUT_IT = "Put the adapter_config.json of the training beside the checkpoint"
_TENSORS_ALONE = "or write the tensors alone with --format safetensors"
_KEEP_IT = "or keep the names that the tensors have with --lora keep"
_NOT_ITS = "an adapter config that is not that of the tensors"
_MOVE_IT = "Move it away and put the right one beside the checkpoint"
_ANOTHERS = f"{_MOVE_IT}, {_TENSORS_ALONE}"


@dataclass(frozen=True, slots=True)
class _Known:
    """What a file says of an adapter."""

    path: Path
    values: Mapping[str, Any]

    @property
    def lora_alpha(self) -> float | None:
        alpha = self.values.get("lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            return None
        return alpha

    @property
    def base(self) -> object:
        return self.values.get("base_model_name_or_path")


def lora_sidecars(
    found: Sidecars, adapter: LoraAdapter, folder: Path | None, base_model: str | None = None
) -> Sidecars:
    """Decide on the sidecars of an adapter: its config and the tokenizer, but not the base model's config.

    Args:
        found: What was found for the checkpoint; left as it is.
        adapter: What the tensors tell.
        folder: The checkpoint.
        base_model: The base model that was named.

    Returns:
        The sidecars; `config` is None, for there is no model's.

    Raises:
        SourceError: `lora_alpha` is nowhere, or the config that is found is not that of these tensors.
    """
    files = [sidecar for sidecar in found.files if sidecar.name not in {CONFIG, GENERATION_CONFIG}]
    missing = [what for what in found.missing if not what.startswith((f"{CONFIG}:", f"{GENERATION_CONFIG}:"))]
    sidecars = Sidecars(files, missing, list(found.warnings), base_model=found.base_model)
    known = _find(folder)
    config = found.config or {}
    origin = origin_in(known.path.parent, folder) if folder is not None else Origin("source", known.path.parent)
    if known.path.name == ADAPTER_CONFIG:
        _check(known, adapter)
        base = _findable(base_model or known.base or config.get("_name_or_path"), sidecars, of_user=bool(base_model))
        edits, dropped = _fit(known, adapter, base)
        content = _edited(known.path, edits)
        origin = origin.but(changed_keys(edits))
        if dropped:
            sidecars.warnings.append(f"modules_to_save of {known.path} are not in the checkpoint: {listing(dropped)}")
    else:
        base = _findable(base_model or config.get("_name_or_path"), sidecars, of_user=bool(base_model))
        content = _made(known, adapter, config, base)
        origin = replace(origin, folder=None, made_of=f"the tensors and {known.path.name}")
        sidecars.warnings.append(
            f"{ADAPTER_CONFIG} is made of the tensors and {known.path.name}, which does not tell use_rslora and "
            "alpha_pattern: they count as off"
        )
    sidecars.files.insert(0, Sidecar(ADAPTER_CONFIG, origin, content))
    if not base:
        sidecars.missing.append(f"base_model_name_or_path in {ADAPTER_CONFIG}: --base-model gives it")
    return sidecars


def live_lora_sidecars(config: Any, base: nn.Module) -> Sidecars:
    """Decide on the sidecars of an adapter of a live model: PEFT's config, as PEFT writes it.

    Args:
        config: PEFT's config of the adapter; left as it is.
        base: The model that the adapter is for.
    """
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    content["inference_mode"] = True
    content["base_model_name_or_path"] = content["base_model_name_or_path"] or vars(base).get("name_or_path") or None
    if content["task_type"] is None:
        cls = model_class(base)
        content["auto_mapping"] = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    text = json.dumps(content, indent=2, sort_keys=True)
    origin = Origin("live object", made_of="the live config")
    sidecars = Sidecars([Sidecar(ADAPTER_CONFIG, origin, text.encode())])
    _findable(content["base_model_name_or_path"], sidecars, of_user=False)
    if not content["base_model_name_or_path"]:
        sidecars.missing.append(f"base_model_name_or_path in {ADAPTER_CONFIG}: the config has none")
    return sidecars


def lora_config(folder: Path | None, adapter: LoraAdapter) -> tuple[Path, Mapping[str, Any]]:
    """Return the nearest file that tells `lora_alpha` of an adapter beside its base model, and what it says.

    Raises:
        SourceError: `lora_alpha` is nowhere, or the config that is found is not that of these tensors.
    """
    known = _find(folder, _KEEP_IT)
    if known.path.name == ADAPTER_CONFIG:
        _check(known, adapter, _KEEP_IT)
    return known.path, known.values


def _find(folder: Path | None, otherwise: str = _TENSORS_ALONE) -> _Known:
    """Find the nearest file that tells lora_alpha."""
    useless = []
    for path in _places(folder) if folder is not None else ():
        known = _Known(path, read_config(path))
        if known.lora_alpha is not None:
            return known
        useless.append(f"{path} with {known.values.get('lora_alpha')}")
    raise SourceError(
        "an adapter whose lora_alpha is not known",
        file=folder,
        expected=f"{ADAPTER_CONFIG} or {_VERL_META} there or above it",
        found=listing(useless) or "neither",
        fix=f"{_PUT_IT}, {otherwise}",
    )


def _places(folder: Path) -> Iterator[Path]:
    for level in levels(folder):
        paths = (level / ADAPTER_CONFIG, level / _VERL_FOLDER / ADAPTER_CONFIG, level / _VERL_META)
        yield from filter(os.path.isfile, paths)


def _check(known: _Known, adapter: LoraAdapter, otherwise: str = _TENSORS_ALONE) -> None:
    """Refuse a config that cannot be that of the tensors; a pattern in it is not tried, for it may never end."""
    values = known.values
    another = f"{_MOVE_IT}, {otherwise}"
    if values.get("peft_type") != "LORA":
        what, found = "an adapter config of another kind", values.get("peft_type")
        raise SourceError(what, file=known.path, expected="peft_type LORA", found=found, fix=another)
    if values.get("target_parameters"):  # whose rank is that of all experts together, and whose modules are not listed
        return
    pattern = values.get("rank_pattern")
    ranks = [values.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    _check_ranks(known, adapter, {rank for rank in ranks if isinstance(rank, int)}, another)
    targets = values.get("target_modules")
    ends = set(map(str, targets)) if isinstance(targets, list) else set()
    for module in adapter.ranks if ends else ():
        segments = module.split(".")
        if values.get("ensure_weight_tying") and is_embedding(module):  # PEFT has adapted what is tied to a target too
            continue
        if all(".".join(segments[first:]) not in ends for first in range(len(segments))):
            raise SourceError(_NOT_ITS, name=module, file=known.path, found=f"targets {listing(ends)}", fix=another)


def _check_ranks(known: _Known, adapter: LoraAdapter, ranks: Collection[int], fix: str = _ANOTHERS) -> None:
    for module, rank in adapter.ranks.items():
        if rank not in ranks:
            found = f"rank {listing(ranks)}" if ranks else "none"
            raise SourceError(_NOT_ITS, name=module, file=known.path, expected=f"rank {rank}", found=found, fix=fix)


def _findable(base: object, sidecars: Sidecars, *, of_user: bool) -> object:
    """Return what names the base model, a folder that the user gave by a path that does not depend on where they stand.

    What a config of the training says is taken as it is: nobody knows where that stood.
    """
    if not isinstance(base, str) or Path(base).is_absolute():
        return base
    key = f"base_model_name_or_path in {ADAPTER_CONFIG}"
    if of_user and is_folder(Path(base)):
        absolute = str(Path(base).resolve())
        sidecars.warnings.append(f"{key} becomes {absolute}; a hub id would mean the same on other machines")
        return absolute
    if base.startswith(".") or base.count("/") > 1 or is_folder(Path(base)):  # a hub's id is at most owner/name
        sidecars.warnings.append(f"{key} is {base}, a relative path, which PEFT looks for where it is started")
    return base


def _fit(known: _Known, adapter: LoraAdapter, base: object) -> tuple[Edits, list[str]]:
    """Return the edits of the keys that the tensors prove wrong, and what the file saves in vain."""
    saved = adapter.saved_modules
    wholes = {whole for module in saved for whole in (module, *parents(module))}
    named = known.values.get("modules_to_save")
    names = list(map(str, named)) if isinstance(named, list) else []
    kept = [name for name in names if any(whole.endswith(name) for whole in wholes)]
    added = [module for module in saved if not any(whole.endswith(tuple(kept)) for whole in (module, *parents(module)))]
    facts: dict[str, object] = {"use_dora": adapter.has_magnitudes, "lora_bias": adapter.has_lora_bias}
    edits: Edits = {(key,): fact for key, fact in facts.items() if known.values.get(key, False) is not fact}
    if [*kept, *added] != names:
        edits["modules_to_save",] = [*kept, *added] or None
    if base and known.base != base:
        edits["base_model_name_or_path",] = base
    return edits, sorted(set(names) - set(kept))


def _edited(path: Path, edits: Edits) -> bytes | Path:
    return edit_json(path.read_bytes().decode(), edits).encode() if edits else path


def _made(known: _Known, adapter: LoraAdapter, config: Mapping[str, Any], base: object) -> bytes:
    """Make a config of what the tensors tell and verl's record adds."""
    if adapter.fused_modules:
        raise SourceError(
            "an adapter of fused experts, which only its config explains,",
            name=adapter.fused_modules[0],
            file=known.path.parent,
            expected=ADAPTER_CONFIG,
            fix=f"{_PUT_IT}, {_TENSORS_ALONE}",
        )
    rank = known.values.get("r")
    if not isinstance(rank, int) or rank <= 0:
        rank = adapter.usual_rank
    elif rank not in adapter.ranks.values():
        _check_ranks(known, adapter, {rank})
    task = str(known.values.get("task_type")).removeprefix("TaskType.")
    content = {
        "base_model_name_or_path": base,
        "bias": adapter.bias,
        "inference_mode": True,
        "lora_alpha": known.lora_alpha,
        "lora_bias": adapter.has_lora_bias,
        "modules_to_save": list(adapter.saved_modules) or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": adapter.rank_pattern(rank),
        "target_modules": adapter.target_modules(_num_layers(config)),
        "task_type": task if task in _TASKS else None,
        "use_dora": adapter.has_magnitudes,
    }
    return json.dumps(content, indent=2, sort_keys=True).encode()


def _num_layers(config: Mapping[str, Any]) -> int | None:
    """Return how many layers a model has that is nothing but one stack of them."""
    num_layers = config.get("num_hidden_layers")
    has_parts = any(isinstance(value, dict) and key.endswith("_config") for key, value in config.items())
    return num_layers if isinstance(num_layers, int) and not has_parts else None
