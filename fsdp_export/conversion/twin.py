"""Twins, which are models without values: of a checkpoint what its config describes, of a module its classes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..names import strip_wrappers
from ..sidecars.live_config import model_class
from .aliases import clean_modules

__all__ = ["has_custom_code", "meta_twin", "pretrained_twins"]

_log = logging.getLogger("fsdp_export")


def meta_twin(config: Mapping[str, Any], *, code: Path | None = None, warns: bool = True) -> nn.Module | None:
    """Build the model of a config without memory for its weights; ties, and defaults of its class, count.

    The class is the one that `architectures` names. A config that was built in code names none; the generating class
    of its model type stands in. Without `code` no code from outside of transformers is run.

    Args:
        config: A parsed `config.json`.
        code: The folder of code that `auto_map` names, which is run; None to leave it alone.
        warns: Whether to warn of a config that its class does not take.

    Returns:
        The model; None for a class that transformers does not have, or that cannot be built.
    """
    try:
        import transformers
    except ImportError:
        return None
    architectures = config.get("architectures") or [_generating_class(config.get("model_type"))]
    class_name = str(architectures[0]).removeprefix("FSDP")
    try:
        model_class, config_class = _custom_classes(config, class_name, code) if code is not None else (None, None)
        model_class = model_class or getattr(transformers, class_name, None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            return None
        return _build(model_class, config_class or model_class.config_class, config)
    except Exception as error:  # noqa: BLE001
        # A config of any age and origin may fail anywhere in its class; the price is that names and ties stay.
        if warns:
            what = "cannot be built from its config, so no weight counts as tied, no shape is compared and names stay"
            _log.warning("%s %s: %s", class_name, what, error)
        return None


def has_custom_code(config: Mapping[str, Any]) -> bool:
    """Tell whether a config names code of its own for its model."""
    auto_map = config.get("auto_map")
    return isinstance(auto_map, dict) and any(key.startswith("AutoModel") for key in auto_map)


def pretrained_twins(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a twin of every model of transformers in a module that is not part of another one.

    Its modules have the classes of before `fully_shard`, no wrappers around them, and the attributes of those that
    they are twins of. None of them is initialized, and no code of a model is run.

    Args:
        model: The module, wrapped or not.

    Returns:
        Pairs of a name, without wrapper segments and with a trailing dot unless it is empty, and a twin. Nothing where
        transformers was not imported, since then there are no such models.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    twins: list[tuple[str, nn.Module]] = []
    for name, module in clean_modules(model):
        is_inner = any(name.startswith(path) for path, _ in twins)
        if isinstance(module, modeling.PreTrainedModel) and not is_inner:
            twins.append((name, _twin_of(module, {})))
    return twins


def _twin_of(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Copy a tree of modules without values, as it was before wrappers and `fully_shard`; no tensor of it is tied."""
    module = _unwrapped(module)
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = object.__new__(model_class(module))
    nn.Module.__init__(twin)
    made[id(module)] = twin
    # Not by `setattr`, of which a class may have its own idea.
    parts = vars(twin)
    parts.update({name: value for name, value in vars(module).items() if name not in parts})
    parts["_modules"].update({name: child and _twin_of(child, made) for name, child in module._modules.items()})  # noqa: SLF001
    for kind in ("_parameters", "_buffers"):
        for name, tensor in vars(module)[kind].items():
            parts[kind][name] = None if tensor is None else _on_meta(tensor)
    return twin


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    value = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what DDP, `torch.compile` and checkpointing wrap."""
    while True:
        children = [(name, child) for name, child in module._modules.items() if child is not None]  # noqa: SLF001
        if len(children) != 1 or strip_wrappers(
            f"{children[0][0]}.", [""] * isinstance(module, DistributedDataParallel)
        ):
            return module
        module = children[0][1]


def _build(model_class: Any, config_class: Any, config: Mapping[str, Any]) -> nn.Module:
    live_config = config_class.from_dict(_decoded(config))
    with torch.device("meta"), _without_initialization():
        twin: Any = model_class(live_config)
    twin.tie_weights()
    return twin  # type: ignore[no-any-return]


def _custom_classes(config: Mapping[str, Any], class_name: str, code: Path) -> tuple[Any, Any]:
    """Import the classes of a model and of its config that `auto_map` names; None for what it does not."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if not has_custom_code(config):
        return None, None
    auto_map = config["auto_map"]
    models = [str(reference) for key, reference in auto_map.items() if key.startswith("AutoModel")]
    named = [reference for reference in models if reference.rpartition(".")[2] == class_name]
    references = [(named or models)[0], auto_map.get("AutoConfig")]
    model_class, config_class = (ref and get_class_from_dynamic_module(ref, str(code)) for ref in references)
    return model_class, config_class


def _decoded(value: Any) -> Any:
    """Copy JSON values, with numbers that JSON has not: transformers 5 writes these as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        is_number = value.keys() == {"__float__"}
        return float(value["__float__"]) if is_number else {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _without_initialization() -> AbstractContextManager[None]:
    """Keep transformers 4 from initializing also what has no values, which takes longer than all the rest; 5 does not.

    It then leaves ties undone.
    """
    from transformers import modeling_utils

    context: AbstractContextManager[None] = getattr(modeling_utils, "no_init_weights", nullcontext)()
    return context


def _generating_class(model_type: object) -> str | None:
    """Name the class that transformers generates with for a model type: the one that has the head that is tied."""
    from transformers.models.auto import modeling_auto

    # The causal one last: of a model with an encoder it is the decoder alone.
    for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        names: Mapping[object, object] = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        if model_type in names:
            return str(names[model_type])
    return None
