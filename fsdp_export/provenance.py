"""What an export is made from, as the record beside the weights tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .conversion.cut import Conversion
from .conversion.transformers import HubConversion
from .dtypes import DtypePolicy
from .places import recorded_place
from .sources.base import Source
from .sources.survey import numbers_of
from .table import dtype_name

__all__ = ["provenance"]


def provenance(
    source: Source,
    *,
    dtype: DtypePolicy,
    conversion: Conversion | None,
    lora: str | None,
    **patterns: Sequence[str],
) -> dict[str, object]:
    """Return what the record of an export says of its source and of the choices that were made.

    Args:
        source: What is exported. Of its path the last two parts count, which tell the step and not the machine.
        dtype: What floating tensors are cast to.
        conversion: What names and tensors become those of the checkpoint.
        lora: What became of LoRA; None if there is none.
        **patterns: Patterns of names, by the option that has them.
    """
    facts: dict[str, Any] = {
        "source": _source(source),
        "dtype": _dtype(dtype),
        "conversion": _maker(conversion),
        "lora": lora,
        **{option: list(given) for option, given in patterns.items()},
    }
    return {key: value for key, value in facts.items() if value}


def _source(source: Source) -> Mapping[str, object]:
    if source.folder is None:
        return {"layout": source.description}
    return {"folder": recorded_place(source.folder), **numbers_of(source.folder), "layout": source.description}


def _dtype(policy: DtypePolicy) -> Mapping[str, object]:
    """Return the fields of a policy; a target that is None keeps every dtype."""
    facts = {key: _plain(value) for key, value in asdict(policy).items()}
    return {key: value for key, value in facts.items() if value} or {"target": "keep"}


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return sorted(map(str, value)) if isinstance(value, (tuple, list, set, frozenset)) else value


def _maker(conversion: Conversion | None) -> str | None:
    is_idle = isinstance(conversion, HubConversion) and conversion.num_converted == (0, 0)
    return conversion.maker or "adapter" if conversion is not None and not is_idle else None
