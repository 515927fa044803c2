"""Names that a checkpoint lacks: further names of a tied weight, and tables that a class computes anew."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..names import strip_wrappers

__all__ = ["clean_modules", "declared_aliases", "find_aliases", "unsaved_names"]


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


def declared_aliases(twin: nn.Module | None, names: Iterable[str]) -> dict[str, str]:
    """Tell which names of a checkpoint its config declares to be tied. Values are not looked at.

    Args:
        twin: The model of the config, as transformers ties it, if there is one.
        names: The names in the checkpoint.

    Returns:
        Each name that is declared a copy, and the name it is a copy of, where the checkpoint has both.
    """
    if twin is None:
        return {}
    present = set(names)
    declared = find_aliases(twin.state_dict(keep_vars=True), twin)
    return {alias: kept for alias, kept in declared.items() if alias in present and kept in present}


def unsaved_names(model: nn.Module) -> set[str]:
    """Return the names that `save_pretrained` leaves out: tables that transformers classes, at any depth, compute anew.

    Args:
        model: The module, wrapped or not.
    """
    return {
        f"{name}{key}"
        for name, module in clean_modules(model)
        for key in getattr(module, "_keys_to_ignore_on_save", None) or ()
    }


def clean_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
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
        for name, module in clean_modules(model)
        for attribute in ("_tied_weights_keys", "_dynamic_tied_weights_keys")
        for key in getattr(module, attribute, None) or ()
    ]


def _kept(names: list[str], patterns: list[str]) -> str:
    declared = sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))
    if len(declared) == len(names):
        return declared[-1]
    return next(name for name in names if name not in declared)
