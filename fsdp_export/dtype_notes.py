"""What a user should know of the dtypes that are written, a line each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .config_json import named_dtype
from .dtypes import HALF_DTYPES, model_dtype
from .errors import listing
from .plan import Plan
from .sidecars.live_config import config_of, unwrap
from .table import counted, dtype_name

__all__ = ["dtype_notes", "live_dtypes"]

_HALF_NAMES = [dtype_name(dtype) for dtype in HALF_DTYPES]


def dtype_notes(plan: Plan, named: Iterable[str | None]) -> list[str]:
    """Tell what was not cast although others were, and what could have been.

    Args:
        plan: What is written.
        named: The dtypes that the configs of the model name, as far as they do.
    """
    policy, notes = plan.casts.policy, []
    spared = [output.name for output in plan.outputs if plan.casts.is_spared(output)]
    if spared:
        what = f"{counted(len(spared), 'tensor')} of float32 kept"
        notes.append(f"{what}, since transformers loads no {dtype_name(policy.target)} for them: {listing(spared)}")
    half = next((name for name in named if name in _HALF_NAMES), None)
    if policy.target is None and half is not None and model_dtype(plan.outputs, plan.casts)[0] is torch.float32:
        way_out = f"dtype={half!r}, or --dtype {half}, writes half the bytes"
        notes.append(f"weights are float32, as they are trained, and the config said {half}: {way_out}")
    return notes


def live_dtypes(model: nn.Module, config: Mapping[str, Any] | None) -> list[str | None]:
    """Return the dtypes that the config of a module and the file that it was loaded from name."""
    live = getattr(config_of(unwrap(model)), "dtype", None)
    return [named_dtype(config or {}), None if live is None else dtype_name(live)]
