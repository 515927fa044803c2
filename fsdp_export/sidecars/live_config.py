"""The configs of a live module as files: edits of the file one was loaded from, or a file made of it.

Nothing here changes the module or its configs, and transformers is not imported: configs know their class.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config_json import (
    Edits,
    class_edits,
    differences,
    edit_json,
    rope_edits,
)
from ..names import strip_wrappers

__all__ = ["config_of", "generate", "live_edits", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that wrappers (DDP, torch.compile, checkpointing) hold."""
    while not hasattr(type(model), "config_class") and "config" not in vars(model):
        children = list(model.named_children())
        # A wrapper has one child, under a segment that leaves names.
        if len(children) != 1 or strip_wrappers(f"{children[0][0]}.", ddp_modules=[""]):
            break
        model = children[0][1]
    return model


def config_of(model: nn.Module) -> Any:
    """Return the config of an unwrapped module, or None if it has none that can be written."""
    config = getattr(model, "config", None)
    return config if callable(getattr(config, "to_dict", None)) else None


def live_edits(live: Any, text: str) -> Edits | None:
    """Return the edits that make a file say what a live config says.

    Both are compared as the config's class sees them, so a default counts as if it were written.

    Args:
        live: A config or generation config.
        text: The text of the file it was loaded from.

    Returns:
        The edits; None when the file, read back with them, would still say something else.
    """
    written, wanted = json.loads(text), _as_json(live.to_dict())
    edits = differences(_read_back(type(live), text), wanted, written)
    left = differences(_read_back(type(live), edit_json(text, edits)), wanted, written)
    return None if left else edits


def generate(live: Any, class_name: str | None = None, dtype: torch.dtype | None = None) -> str:
    """Return the file that `save_pretrained` would write, with the spelling of transformers 4 beside that of 5.

    Args:
        live: A config or generation config.
        class_name: The model's class, for a config.
        dtype: The dtype of the weights, for a config.
    """
    to_json_string = getattr(copy.deepcopy(live), "to_json_string", None)
    text = to_json_string() if to_json_string is not None else _dump(_as_json(live.to_dict()))
    if class_name is None:
        return str(text)
    config = json.loads(text)
    edits = class_edits(config, class_name)
    if dtype is not None:
        edits.update({(key,): str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype")})
    config = json.loads(edit_json(text, edits))
    both = json.loads(edit_json(_dump(config), {**_field_edits(live, config), **rope_edits(config)}))
    if both == config:
        return _dump(config)
    more, less = _dump(both), _dump(config)
    config_class: Any = type(live)  # mypy takes type[Any] for no Hashable
    return more if _means_the_same(config_class, more, less) else less


def _field_edits(live: Any, config: Mapping[str, Any]) -> Edits:
    """Return the edits that add fields under their own names where a class writes them under other ones.

    So does transformers 5 with `num_experts` of some models, of which transformers 4 then takes the default.
    """
    fields = getattr(type(live), "__dataclass_fields__", {})
    names = getattr(type(live), "attribute_map", {})
    added = {name: key for name, key in names.items() if name in fields and name not in config and key in config}
    return {(name,): config[key] for name, key in added.items()}


@functools.lru_cache(maxsize=16)
def _means_the_same(config_class: Any, more: str, less: str) -> bool:
    """Tell whether a file with further keys is read as the one without them, those keys apart."""
    try:
        return _contains(_read_back(config_class, more), _read_back(config_class, less))
    except Exception:  # noqa: BLE001  a class may refuse the further keys with any error
        return False


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and _contains(whole[key], value) for key, value in part.items())
    return bool(whole == part)


def _read_back(config_class: Any, text: str) -> dict[str, Any]:
    """Return what the class of a config makes of a file, defaults included."""
    config = json.loads(text)
    decode = getattr(config_class, "_decode_special_floats", None)  # of infinities, which are not JSON
    return _as_json(config_class.from_dict(decode(config) if decode is not None else config).to_dict())


def _as_json(value: Any) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return parsed


def _dump(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
