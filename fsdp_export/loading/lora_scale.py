"""Whether the factors of an adapter count in a model as they did where they were trained: no tensor tells."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from torch import nn

from ..conversion.peft_module import find_peft
from ..errors import ExportError
from ..paths import is_file
from ..sidecars.lora import ADAPTER_CONFIG
from ..sidecars.of_folder import read_config

__all__ = ["warn_of_another_scale"]

_log = logging.getLogger("fsdp_export")
_KEYS = ("lora_alpha", "alpha_pattern", "use_rslora")


def warn_of_another_scale(model: nn.Module, folder: Path | None) -> None:
    """Log what the config beside an adapter says of its scale if PEFT's config in the model says another thing.

    Args:
        model: The model into which the adapter is loaded.
        folder: Where it lies.
    """
    peft, path = find_peft(model), folder / ADAPTER_CONFIG if folder is not None else None
    if peft is None or path is None or not is_file(path):
        return
    with suppress(ExportError):  # a config that is damaged tells nothing, and one of several adapters is not known
        theirs, own = read_config(path), peft.config
        for key in _KEYS:
            if key in theirs and hasattr(own, key) and (theirs[key] or None) != (getattr(own, key) or None):
                _log.warning(
                    "%s says %s=%r, and the model has %r: the adapter counts otherwise in it than where it was "
                    "trained. Give the model's LoraConfig the same",
                    *(path, key, theirs[key], getattr(own, key)),
                )
