"""Checkpoints with LoRA in them: an adapter, by itself or taken from its model, or a model to merge it into.

The tensors of an adapter get PEFT's names, and PEFT's config beside them; a merged model is one like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from .conversion.lora_view import LoraView
from .conversion.peft import inspect_lora, lora_names
from .conversion.peft_names import parse
from .conversion.peft_states import PeftState, find_peft_state
from .errors import SourceError, UsageError, listing
from .sidecars.lora import ADAPTER_CONFIG, lora_config, lora_sidecars
from .sidecars.sidecar import Sidecars
from .sources.stored import StoredSource
from .spec import TensorInfo

__all__ = ["StoredLora", "describe_lora", "find_lora", "merged_view"]


@dataclass(frozen=True)
class StoredLora:
    """What of LoRA a checkpoint on disk has, and what becomes of it.

    Attributes:
        is_adapter: Whether the source is an adapter, or has been reduced to the one in it.
        state: The model and the adapter that are to be merged; None if there is nothing to merge.
        notes: What was decided, a line each.
        is_there: Whether there is any.
    """

    is_adapter: bool
    state: PeftState | None
    notes: list[str]
    is_there: bool = True


def find_lora(source: StoredSource, choice: str, *, is_converted: bool) -> StoredLora:
    """Find LoRA in a source, and leave of it what was chosen.

    Args:
        source: The checkpoint. An adapter's tensors get PEFT's names.
        choice: `merge`, `adapter`, `keep`, or `auto`: what is an adapter stays one, and a model is merged.
        is_converted: Whether a trainer's adapter names the tensors: then what is LoRA alone is left to that.

    Raises:
        UsageError: There are several adapters, and none is called default; or nothing to merge one into.
        SourceError: There are adapters of another kind than LoRA, or `lora_alpha` is not known.
    """
    if choice not in {"auto", "merge", "adapter", "keep"}:
        raise UsageError("no such choice for LoRA", expected="auto, merge, adapter or keep", found=choice)
    if choice == "keep":
        is_there = any(parse(spec.name).part for spec in source.specs)
        return StoredLora(is_adapter=False, state=None, notes=[], is_there=is_there)
    is_adapter, notes = (False, []) if is_converted else _name_as_lora(source)
    if is_adapter and choice == "merge":
        fix = "Leave out --lora merge, and load the adapter with PEFT"
        raise UsageError("an adapter without its base model cannot be merged", file=source.folder, fix=fix)
    state = None if is_adapter else find_peft_state(source.specs, source.folder or "")
    if state is not None and choice == "adapter":
        return _reduced(source, state)
    return StoredLora(is_adapter, state, notes, is_there=is_adapter or state is not None)


def merged_view(source: StoredSource, state: PeftState, twin: nn.Module | None, notes: list[str]) -> LoraView:
    """Plan the merge of an adapter into the model that it stands with.

    Args:
        source: The checkpoint.
        state: Its tensors.
        twin: The model of its config, if there is one: it knows which weights are transposed.
        notes: What was decided, a line each; added to.

    Raises:
        SourceError: `lora_alpha` is not known, or something cannot be merged.
    """
    adapter = inspect_lora(state.adapter_tensors(), source.folder or "")
    path, config = lora_config(source.folder, adapter)
    notes.append(f"{adapter} merged into the weights, with lora_alpha {config['lora_alpha']} of {path}")
    notes += _notes_on_others(state)
    if path.name != ADAPTER_CONFIG:
        notes.append(f"{path.name} does not tell use_rslora and alpha_pattern: they count as off")
    modules = dict(twin.named_modules()) if twin is not None else {}
    return state.merged(config, source.device, lambda name: _is_transposed(modules.get(name)))


def describe_lora(
    source: StoredSource, tensors: Iterable[TensorInfo], found: Sidecars, base_model: str | None
) -> tuple[Sidecars, SourceError | None]:
    """Decide on what stands beside an adapter, and say in the source's description what it is.

    Args:
        source: The adapter.
        tensors: What of it is exported.
        found: The sidecars that were found for the checkpoint.
        base_model: The base model that was named.

    Returns:
        The sidecars; or none, and why there is no config for it.

    Raises:
        SourceError: A module has half of an adapter, or matrices that do not fit each other.
    """
    adapter = inspect_lora(tensors, source.folder or "")
    source.description = f"{adapter}, {source.description}"
    try:
        return lora_sidecars(found, adapter, source.folder, base_model), None
    except SourceError as error:
        return Sidecars(), error


def _is_transposed(module: object) -> bool | None:
    """Tell whether a module of a model has its weight, or those of its experts, as (in, out); None if nothing tells."""
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D":
        return True
    knows = module is not None and not hasattr(module, "weight")
    return bool(getattr(module, "is_transposed", False)) if knows else None


def _reduced(source: StoredSource, state: PeftState) -> StoredLora:
    """Leave of a model its adapter."""
    config: Mapping[str, Any] = {}
    with suppress(SourceError):  # without a config the tensors can still be written alone
        _, config = lora_config(source.folder, inspect_lora(state.adapter_tensors(), source.folder or ""))
    names = state.adapter_names(str(config.get("bias", "none")))
    num_left_out = len(source.specs) - len(names)
    source.rename(names)
    notes = [f"{num_left_out:,} tensors are not of the adapter and left out", *_notes_on_others(state)]
    return StoredLora(is_adapter=True, state=None, notes=notes)


def _notes_on_others(state: PeftState) -> list[str]:
    others = listing(map(repr, state.other_adapters))
    return [f"of several adapters {state.adapter!r} is taken, and left out: {others}"] if others else []


def _name_as_lora(source: StoredSource) -> tuple[bool, list[str]]:
    """Find out whether a source is an adapter, and if it is, give its tensors PEFT's names.

    Returns:
        Whether it is one, and what was left out, a line each.

    Raises:
        UsageError: There are several adapters, and none is called default.
        SourceError: It is an adapter of another kind than LoRA.
    """
    names = lora_names([spec.name for spec in source.specs], source.folder or "")
    if names is None:
        return False, []
    num_left_out = len(source.specs) - len(names)
    source.rename(names)
    return True, [f"{num_left_out:,} tensors are not of the adapter and left out"] if num_left_out else []
