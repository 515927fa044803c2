"""The twin of a checkpoint: the model that its config describes, on the meta device, so without values."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["hub_form", "meta_twin"]

_log = logging.getLogger("fsdp_export")

# Kernels and backbones of the hub, which a model fetches as it is built.
_FETCHES = re.compile(r".*_implementation(_.*)?|use_kernels|kernel_config|.*pretrained_backbone|quantization_config")
_COUNT = re.compile(r"(.*_)?(layers?|blocks|depth|experts)")
_MORE_NAMES = 1000
_CALLS_PER_NAME = 100


def meta_twin(config: Mapping[str, Any], num_names: int = 0, *, warns: bool = True) -> nn.Module | None:
    """Build the model of a config without memory for its weights; ties, and defaults of its class, count.

    The class is the one that `architectures` names. A config that was built in code names none; the generating class
    of its model type stands in. No code from outside of transformers is run.

    Args:
        config: A parsed `config.json`.
        num_names: Number of tensors of the checkpoint; a model with many more is not built.
        warns: Whether to warn of a config that its class does not take.

    Returns:
        The model; None for a class that transformers does not have, or that cannot be built.
    """
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
        return _build(model_class, config, num_names)
    except Exception as error:  # noqa: BLE001
        # A config of any age and origin may fail anywhere in its class; the price is one copy too many in the files.
        if warns:
            what = "cannot be built from its config, so no weight counts as tied and no shape is compared"
            _log.warning("%s %s: %s", model_class.__name__, what, error)
        return None


def hub_form(twin: nn.Module, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes under which `save_pretrained` writes tensors of a twin.

    From transformers 5 on, fused experts and models of several parts are written otherwise than their modules have
    them. Where nothing is converted, or that fails, the names and shapes are those of the modules.

    Args:
        twin: What `meta_twin` built.
        names: Names of the twin's own. What is written as one tensor must be there together.
    """
    tensors = twin.state_dict()
    chosen = {name: tensors[name] for name in names}
    try:
        from transformers.core_model_loading import revert_weight_conversion

        chosen = revert_weight_conversion(twin, dict(chosen))  # type: ignore[arg-type]
    except ImportError:  # transformers 4
        pass
    except Exception as error:  # noqa: BLE001  a conversion of any class may fail, and two forms are only a courtesy
        _log.debug("the conversion of %s cannot be reverted: %s", type(twin).__name__, error)
    return {name: tuple(tensor.shape) for name, tensor in chosen.items()}


def _build(model_class: Any, config: Mapping[str, Any], num_names: int) -> nn.Module:
    live_config = model_class.config_class.from_dict(_harmless(config, num_names))
    limit = _Limit(_CALLS_PER_NAME * (num_names + _MORE_NAMES))
    with torch.device("meta"), limit, _without_initialization():
        twin: Any = model_class(live_config)
    twin.tie_weights()
    return twin  # type: ignore[no-any-return]


def _harmless(value: Any, num_names: int) -> Any:
    """Copy a config without what makes transformers fetch code or weights.

    Numbers that JSON has not get their value back: transformers 5 writes them as `{"__float__": "Infinity"}`.

    Raises:
        ValueError: It counts more layers than a model with as many tensors can have.
    """
    if isinstance(value, list):
        return [_harmless(item, num_names) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    for key, count in value.items():
        if _COUNT.fullmatch(str(key)) and isinstance(count, int) and count > num_names + _MORE_NAMES:
            raise ValueError(f"{key} is {count:,}, and the checkpoint has {num_names:,} tensors")
    return {key: _harmless(item, num_names) for key, item in value.items() if not _FETCHES.fullmatch(str(key))}


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
        if isinstance(model_type, str) and model_type in names:
            return str(names[model_type])
    return None
