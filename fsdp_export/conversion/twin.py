"""The twin of a checkpoint: the model that its config describes, on the meta device, so without values."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = ["hub_form", "meta_twin"]

_log = logging.getLogger("fsdp_export")

_NAMES_CODE = re.compile(r".*_implementation(_.*)?|use_kernels|kernel_config")


def meta_twin(config: Mapping[str, Any], *, warns: bool = True) -> nn.Module | None:
    """Build the model of a config without memory for its weights; ties, and defaults of its class, count.

    The class is the one that `architectures` names. A config that was built in code names none; the generating class
    of its model type stands in. No code from outside of transformers is run.

    Args:
        config: A parsed `config.json`.
        warns: Whether to warn of a config that its class does not take.

    Returns:
        The model; None for a class that transformers does not have, or that cannot be built.
    """
    try:
        import transformers
    except ImportError:
        return None
    architectures = config.get("architectures") or [_generating_class(config.get("model_type"))]
    model_class = getattr(transformers, str(architectures[0]).removeprefix("FSDP"), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        return None
    try:
        return _build(model_class, config)
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


def _build(model_class: Any, config: Mapping[str, Any]) -> nn.Module:
    live_config = model_class.config_class.from_dict(_decoded(config))
    with torch.device("meta"), _without_initialization():
        twin: Any = model_class(live_config)
    twin.tie_weights()
    return twin  # type: ignore[no-any-return]


def _decoded(value: Any) -> Any:
    """Copy JSON values, with numbers that JSON has not: transformers 5 writes these as `{"__float__": "Infinity"}`.

    What names implementations of layers is left out: such a name may be a repository, whose code would be run.
    """
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items() if not _NAMES_CODE.fullmatch(str(key))}
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
