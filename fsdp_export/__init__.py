"""Get the weights out of a sharded FSDP2 training run, without moving or gathering the model.

Example::

    from fsdp_export import Exporter, load_checkpoint, save_checkpoint

    save_checkpoint(model, "ckpt/", tokenizer=tokenizer)     # every rank calls; a Hugging Face folder appears

    load_checkpoint(model, "ckpt/")                          # into whatever mesh and device the model has

    exporter = Exporter(model, dtype="bfloat16")             # plans once, used every step
    for name, tensor in exporter.tensors():                  # full tensors on the device, in plan order
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from .api import compare_checkpoints, export_checkpoint, load_checkpoint, save_checkpoint
    from .errors import ExportError
    from .exporter import Exporter
    from .load import LoadReport
    from .pending import PendingSave
    from .sinks.base import MemorySink, Sink
    from .sinks.huggingface import Report
    from .verification import Comparison

__all__ = [
    "Comparison",
    "ExportError",
    "Exporter",
    "LoadReport",
    "MemorySink",
    "PendingSave",
    "Report",
    "Sink",
    "__version__",
    "compare_checkpoints",
    "export_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]

# Loaded at first use: `fsdp-export --help` must not wait for torch.
_MODULES = {
    "Comparison": "verification",
    "ExportError": "errors",
    "Exporter": "exporter",
    "LoadReport": "load",
    "MemorySink": "sinks.base",
    "PendingSave": "pending",
    "Report": "sinks.huggingface",
    "Sink": "sinks.base",
    "compare_checkpoints": "api",
    "export_checkpoint": "api",
    "load_checkpoint": "api",
    "save_checkpoint": "api",
}


def __dir__() -> list[str]:
    """List what is promised, loaded or not: `help()` and a prompt that completes names show it."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import what the package promises at the moment it is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
