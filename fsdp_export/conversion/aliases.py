"""Names that a checkpoint lacks: further names of a tied weight, and tables that a class computes anew."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ..names import strip_wrappers

__all__ = ["declared_aliases", "find_aliases", "unsaved_names"]

_log = logging.getLogger("fsdp_export")

# Kernels and backbones of the hub, which a model fetches as it is built, and code beside the weights.
_FETCHES = re.compile(
    r"auto_map|.*attn_implementation.*|.*experts_implementation.*|use_kernels|.*pretrained_backbone|quantization_config"
)
_COUNT = re.compile(r"(.*_)?(layers?|blocks|depth|experts)")
_MORE_NAMES = 1000
_CALLS_PER_NAME = 100


def find_aliases(named: Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """Group the names of a live module's tensors by identity, and choose one of each group.

    Identity, not memory: on a rank with an empty shard unrelated tensors have the same data pointer. Of tied names
    the one is kept that `save_pretrained` keeps, which drops what the model's class declares as tied; where nothing
    is declared, the first. Not collective, and the same on every rank.

    Args:
        named: Name to parameter or buffer, in the order of `state_dict(keep_vars=True)`, without wrapper segments.
        model: The module, wrapped or not.

    Returns:
        Each name to leave out, and the name under which the same tensor is kept.
    """
    groups: dict[int, list[str]] = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(name)
    tied = [names for names in groups.values() if len(names) > 1]
    patterns = _declared_patterns(model) if tied else []
    aliases = {}
    for names in tied:
        kept = _kept(names, patterns)
        aliases.update({name: kept for name in names if name != kept})
    return aliases


def declared_aliases(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Tell which names of a checkpoint its config declares to be tied.

    The class that `architectures` names is built on the meta device, as transformers ties it: defaults of the config
    class count, and no code from outside of transformers is run. A config that was built in code names no class; the
    generating one of its model type stands in. Values are not looked at.

    Args:
        config: A parsed `config.json`.
        names: The names in the checkpoint.

    Returns:
        Each name that is declared a copy, and the name it is a copy of, where the checkpoint has both. Empty for a
        class that transformers does not have.
    """
    present = set(names)
    twin = _meta_twin(config, len(present))
    if twin is None:
        return {}
    declared = find_aliases(twin.state_dict(keep_vars=True), twin)
    return {alias: kept for alias, kept in declared.items() if alias in present and kept in present}


def unsaved_names(model: nn.Module) -> set[str]:
    """Return the names that `save_pretrained` leaves out: tables that transformers classes, at any depth, compute anew.

    Args:
        model: The module, wrapped or not.
    """
    return {
        f"{name}{key}"
        for name, module in _clean_modules(model)
        for key in getattr(module, "_keys_to_ignore_on_save", None) or ()
    }


def _clean_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules under their names, without wrapper segments and with a trailing dot."""
    modules = dict(model.named_modules())
    ddp_modules = [name for name, module in modules.items() if isinstance(module, DistributedDataParallel)]
    for name, module in modules.items():
        yield strip_wrappers(f"{name}.", ddp_modules) if name else "", module


def _declared_patterns(model: nn.Module) -> list[str]:
    """Collect the regular expressions by which transformers classes, at any depth, declare names as tied.

    They are a list in transformers 4 and the keys of a dict in transformers 5; unescaped and not anchored in both.
    """
    return [
        f"{name}{key}"
        for name, module in _clean_modules(model)
        for attribute in ("_tied_weights_keys", "_dynamic_tied_weights_keys")
        for key in getattr(module, attribute, None) or ()
    ]


def _kept(names: list[str], patterns: list[str]) -> str:
    declared = sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))
    if len(declared) == len(names):
        return declared[-1]
    return next(name for name in names if name not in declared)


def _meta_twin(config: Mapping[str, Any], num_names: int) -> nn.Module | None:
    """Build the model of a config without memory for its weights; None where transformers cannot."""
    try:
        import transformers
    except ImportError:
        return None
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    class_name = first or _generating_class(config.get("model_type"))
    model_class = getattr(transformers, str(class_name).removeprefix("FSDP"), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        return None
    try:
        config_class: Any = model_class.config_class
        live_config = config_class.from_dict(_harmless(config, num_names))
        with torch.device("meta"), _Limit(_CALLS_PER_NAME * (num_names + _MORE_NAMES)):
            twin: nn.Module = model_class(live_config)
    except Exception as error:  # noqa: BLE001
        # A config of any age and origin may fail anywhere in its class; the price is one copy too many in the files.
        _log.warning("%s cannot be built from its config, so no weight counts as tied: %s", model_class.__name__, error)
        return None
    return twin


class _Limit(TorchFunctionMode):
    """Lets only so many functions of torch be called: a config may ask for a model without end."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self._num_calls = num_calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_calls -= 1
        if self._num_calls < 0:
            raise ValueError("a model with many more tensors than the checkpoint")
        return func(*args, **(kwargs or {}))


def _harmless(config: Mapping[str, Any], num_names: int) -> dict[str, Any]:
    """Copy a config without what makes transformers fetch code or weights.

    Raises:
        ValueError: It counts more layers than a model with as many tensors can have.
    """
    copied: dict[str, Any] = {}
    for key, value in config.items():
        if _COUNT.fullmatch(str(key)) and isinstance(value, int) and value > num_names + _MORE_NAMES:
            raise ValueError(f"{key} is {value:,}, and the checkpoint has {num_names:,} tensors")
        if not _FETCHES.fullmatch(str(key)):
            copied[key] = _harmless(value, num_names) if isinstance(value, dict) else copy.deepcopy(value)
    return copied


def _generating_class(model_type: object) -> str | None:
    """Name the class that transformers generates with for a model type: the one that has the head that is tied."""
    from transformers.models.auto import modeling_auto

    # The causal one last: of a model with an encoder it is the decoder alone.
    for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        names: Mapping[object, object] = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        if isinstance(model_type, str) and model_type in names:
            return str(names[model_type])
    return None
