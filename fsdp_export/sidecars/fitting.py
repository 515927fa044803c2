"""A config that is true to the weights that were planned, and what it declares that they lack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ..config_json import REMOVED, added_rope_edits, dtype_edits, tie_edits, untie_edits
from ..quantization import quantizations
from ..table import counted
from .sidecar import Sidecars

__all__ = ["fit_config", "undelivered_layers"]

_NUM_DRAFT_LAYERS = re.compile(r"num_nextn_predict_layers|num_mtp_(layers|modules)|mtp_num(_hidden)?_layers")
_DRAFT_SEGMENT = re.compile(r"mtp(_.+)?|nextn(_.+)?")


def fit_config(
    sidecars: Sidecars,
    *,
    dtype: torch.dtype | None,
    is_uniform: bool = False,
    tied: bool | None = None,
    quantized: bool | None = None,
) -> Sidecars:
    """Return the sidecars with a config that is true to the weights; only what is not is edited.

    Args:
        sidecars: What was decided; left as it is.
        dtype: The dtype of the weights; None when none of them is floating.
        is_uniform: Whether all parts of the model have it.
        tied: False where weights that the config declares tied are written one by one, since their values differ; True
            where embeddings that it declares not to be are one parameter, which is written once.
        quantized: Whether tensors are packed as `quantization_config` says; False drops it, None leaves it.
    """
    fitted = replace(
        sidecars, files=list(sidecars.files), missing=list(sidecars.missing), warnings=list(sidecars.warnings)
    )
    config = sidecars.config
    if config is None:
        return fitted
    edits = dict(sidecars.edits)
    if dtype is not None:
        edits.update(dtype_edits(config, dtype, everywhere=is_uniform))
    if tied:
        edits.update(tie_edits(config))
        fitted.warnings.append("embeddings are tied that are not in the config: the flag is on")
    if tied is False:
        edits.update(untie_edits(config))
        fitted.warnings.append("weights that are tied in the config differ: all are written, and the flag is off")
    for path in quantizations(config) if quantized is False else ():
        edits[path] = REMOVED
        fitted.warnings.append(f"{'.'.join(path)} was dropped: the weights are not quantized")
    edits.update(added_rope_edits(config))
    fitted.edit_config(edits)
    return fitted


def undelivered_layers(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return what draft heads (MTP layers) a config declares and names lack, a line each.

    transformers has no class for most of them, so none misses them; engines look for them to decode speculatively.
    """
    names = list(names)
    lines = []
    text = config.get("text_config")
    for path, part in (("", config), ("text_config.", text if isinstance(text, dict) else {})):
        for key, count in part.items():
            if not _NUM_DRAFT_LAYERS.fullmatch(key) or isinstance(count, bool) or not isinstance(count, int):
                continue
            if count > 0 and not any(_are_drafts(name, part.get("num_hidden_layers")) for name in names):
                layers = counted(count, "draft layer")
                lines.append(f"config.json declares {layers} ({path}{key}), of which there is no tensor")
    return lines


def _are_drafts(name: str, num_layers: object) -> bool:
    """Tell whether a tensor is one of a draft head: by its name, or as one of a layer behind the last."""
    segments = name.split(".")
    numbers = [int(after) for one, after in pairwise(segments) if one == "layers" and after.isdecimal()]
    is_behind = isinstance(num_layers, int) and any(number >= num_layers for number in numbers)
    return is_behind or any(map(_DRAFT_SEGMENT.fullmatch, segments))
