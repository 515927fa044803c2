"""Which entries of a DCP checkpoint are the model, and under which names it is exported.

A checkpoint often holds more than the model: optimizer, scheduler, counters. The planner of DCP records under which
nested keys the saved state dict had every entry, so `{"model": ...}` can be told from a model whose own names begin
with `model.`, as those of Hugging Face do. Only where that record is missing do the names have to tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import NotFoundError, SourceError, UsageError, listing
from ..names import strip_wrappers

__all__ = ["Entries", "ModelState", "find_model", "name_keys"]

# What people call the entry of a state dict that is the model, and where wrappers of the whole state dict put it.
_MODEL_KEYS = frozenset({"model", "model_state", "model_state_dict", "module", "net", "network", "state_dict"})
_COMPOSER = "state.model."
# Below `model.` only in a state dict that wraps the model, which transformers or PEFT named.
_SURELY_WRAPPED = ("model.model.", "model.lm_head.", "model.base_model.model.")
_UNMISTAKABLE_PREFIXES = ("app.model.", _COMPOSER, "model_state_dict.", "model_state.", "state_dict.")
_OPTIMIZER = re.compile(r"optim(izer)?s?(_\w+)?|opt_states?")
_OTHER_STATE = re.compile(r"(lr_)?schedulers?|train_state|data_?loaders?|rng(_\w+)?|(grad_)?scaler")
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_FLAT_SHARDS = frozenset({"flat_param", "_flat_param"})


class Entries(Protocol):
    """What a checkpoint holds: all attributes are as in `Metadata`.

    Attributes:
        file: A file of the folder that messages name.
        tensors: Names of the tensors, in the order of the file.
        paths: For every name the nested keys under which the saved state dict had it, where that is known.
    """

    file: Path
    tensors: list[str]
    paths: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ModelState:
    """The model in a checkpoint.

    Attributes:
        prefix: What its keys begin with in the checkpoint.
        keys: For every name of the model its key in the checkpoint, in the order of the model's state dict.
    """

    prefix: str
    keys: dict[str, str]


def find_model(entries: Entries, prefix: str | None, *, of_lightning: bool = False) -> ModelState:
    """Find the tensors of the model.

    The order is that of the planner's record, which begins with the whole state dict of a rank. That of the tensors
    depends on which rank wrote which replica, and stands in only where there is no record.

    Args:
        entries: What the checkpoint holds.
        prefix: What the model's keys begin with, with or without the last dot; `""` for nothing; None to find out.
        of_lightning: Whether a LightningModule was saved, which has the model in one of its attributes.

    Raises:
        NotFoundError: There is no tensor below the prefix, or none that is not of an optimizer.
        UsageError: Several prefixes could be meant.
        SourceError: The model is stored in flat shards of FSDP1, or two keys become one name.
    """
    folder = entries.file.parent
    has_paths = entries.paths.keys() >= set(entries.tensors)
    wrapper_of = _wrappers_by_path(entries) if has_paths else _wrappers_by_name(entries)
    if not wrapper_of:
        what = "only optimizer and other state, no model," if entries.tensors else "no tensor"
        raise NotFoundError(what, file=folder, fix="Name the folder of the model's checkpoint")
    ddp_modules: tuple[str, ...] = ()
    if prefix is None:
        prefix, keys = _find_prefix(entries, wrapper_of, has_paths=has_paths, of_lightning=of_lightning)
        if all(strip_wrappers(key.removeprefix(prefix)).startswith("module.") for key in keys):
            ddp_modules = ("",)
    else:
        prefix = f"{prefix.rstrip('.')}." if prefix else ""
        keys = [key for key in wrapper_of if key.startswith(prefix)]
        if not keys:
            found = listing(map(repr, set(wrapper_of.values())))
            fix = "Leave --prefix out, or give one of these"
            raise NotFoundError(f"no tensor of a model below {prefix!r}", file=folder, found=found, fix=fix)
    return ModelState(prefix, name_keys(folder, keys, prefix, ddp_modules))


def _find_prefix(
    entries: Entries, wrapper_of: Mapping[str, str], *, has_paths: bool, of_lightning: bool
) -> tuple[str, list[str]]:
    """Return what the model's keys begin with, and these keys."""
    candidates = _choose_by_path(wrapper_of) if has_paths else _choose_by_name(wrapper_of)
    wrapper = candidates[0]
    keys = [key for key in wrapper_of if wrapper_of[key] == wrapper or not (has_paths or wrapper)]
    if len(candidates) == 1 and (of_lightning or wrapper == _COMPOSER):
        names = [key.removeprefix(wrapper) for key in keys]
        candidates = [wrapper + attribute for attribute in _attributes(names, only_model=not of_lightning)]
    if len(candidates) > 1:
        raise UsageError(
            "several prefixes that could be the model's",
            file=entries.file.parent,
            found=listing(map(repr, candidates)),
            fix="Say which with --prefix; --prefix '' keeps the names as they are",
        )
    return candidates[0], [key for key in keys if key.startswith(candidates[0])]


def _attributes(names: Sequence[str], *, only_model: bool) -> list[str]:
    """Return under which attributes of a saved module the model could be, `""` if that is the model itself.

    Args:
        names: The module's names.
        only_model: Whether the attribute could only be called `model`.
    """
    firsts = {name.partition(".")[0] for name in names}
    if len(firsts) == 1:
        (first,) = firsts
        inner = [name.partition(".")[2] for name in names]
        if not strip_wrappers(first):
            return [f"{first}.{attribute}" for attribute in _attributes(inner, only_model=only_model)]
        is_container = any("." in name for name in inner)  # and not a layer
        return [f"{first}." if is_container and (first == "model" or not only_model) else ""]
    if only_model:
        return [""]
    # Several attributes: what has the parts of a language model of transformers is one, and the whole is another.
    parts = {first: (f"{first}.model.", f"{first}.lm_head.") for first in sorted(firsts)}
    return ["", *(f"{first}." for first, inside in parts.items() if any(name.startswith(inside) for name in names))]


def _wrappers_by_path(entries: Entries) -> dict[str, str]:
    """Map the keys of tensors that are of no optimizer to what wraps them, as the planner recorded it."""
    tensors = set(entries.tensors)
    with_moments = {path[:-1] for path in entries.paths.values() if _is_moment(path)}
    wrapper_of = {}
    for key, path in entries.paths.items():
        *outer, name = path
        is_state = (
            path[:-1] in with_moments
            or any(map(_OPTIMIZER.fullmatch, outer))
            or bool(outer and _OTHER_STATE.fullmatch(outer[-1]))
        )
        if key in tensors and not is_state and (outer or not _is_state_name(key)):
            wrapper_of[key] = key.removesuffix(name)
    return wrapper_of


def _choose_by_path(wrapper_of: Mapping[str, str]) -> list[str]:
    """Return what could wrap the model: an entry called so, else nothing, else whatever there is."""
    wrappers = set(wrapper_of.values())
    named = [wrapper for wrapper in wrappers if wrapper.split(".")[-2:-1] and wrapper.split(".")[-2] in _MODEL_KEYS]
    return named or ([""] if "" in wrappers else list(wrappers))


def _wrappers_by_name(entries: Entries) -> dict[str, str]:
    """Map the keys of tensors that are of no optimizer to the customary wrapper that they begin with."""
    prefixes = (*_UNMISTAKABLE_PREFIXES, "model.", "module.")
    return {
        key: next((prefix for prefix in prefixes if key.startswith(prefix)), "")
        for key in entries.tensors
        if not _is_state_name(key)
    }


def _choose_by_name(wrapper_of: Mapping[str, str]) -> list[str]:
    """Return what could wrap the model, judged by the names alone."""
    # A lone counter beside a wrapped model has no dot.
    wrappers = {wrapper for key, wrapper in wrapper_of.items() if wrapper or "." in key} or {""}
    unmistakable = [wrapper for wrapper in wrappers if wrapper in _UNMISTAKABLE_PREFIXES]
    if unmistakable:
        return unmistakable
    if "" in wrappers:
        return [""]
    if wrappers == {"model."} and not any(key.startswith(_SURELY_WRAPPED) for key in wrapper_of):
        return ["model.", ""]  # a wrapper, or a Hugging Face model without a head of its own
    return list(wrappers)


def _is_state_name(key: str) -> bool:
    *outer, _ = segments = key.split(".")
    is_other = bool(outer) and _OTHER_STATE.fullmatch(outer[0]) is not None
    return is_other or any(map(_OPTIMIZER.fullmatch, outer[:3])) or _is_moment(segments)


def _is_moment(path: Sequence[str]) -> bool:
    return path[-1] in _MOMENTS and "state" in path


def name_keys(folder: Path, keys: Sequence[str], prefix: str = "", ddp_modules: Sequence[str] = ()) -> dict[str, str]:
    """Map the names under which keys are exported to the keys.

    Args:
        folder: The checkpoint's folder, for messages.
        keys: The keys of the model's tensors.
        prefix: What they begin with.
        ddp_modules: Names of DistributedDataParallel modules behind the prefix.

    Raises:
        SourceError: A tensor is a flat shard of FSDP1, or two keys become one name.
    """
    named: dict[str, str] = {}
    for key in keys:
        if key.rpartition(".")[2] in _FLAT_SHARDS:
            raise SourceError(
                "a flat shard of FSDP1",
                name=key,
                file=folder,
                fix="Save with StateDictType.SHARDED_STATE_DICT, or train with fully_shard (FSDP2)",
            )
        name = strip_wrappers(key.removeprefix(prefix), ddp_modules)
        if name in named:
            found = f"{named[name]!r} and {key!r}"
            fix = "Save the model without its wrapper"
            raise SourceError("two keys become one name", name=name, file=folder, found=found, fix=fix)
        named[name] = key
    return named
