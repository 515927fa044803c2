"""The twin of a live module: its classes and its tree, without wrappers and without values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..names import strip_wrappers
from .aliases import clean_modules

__all__ = ["model_class", "pretrained_twins"]


_Original = Callable[[nn.Module], nn.Module]
_REGISTERED = ("_modules", "_parameters", "_buffers")


def model_class(model: nn.Module) -> Any:
    """Return the class of a module as it was before `fully_shard` or `replicate` put their own on top of it."""
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed."))


def pretrained_twins(model: nn.Module, original: _Original = lambda module: module) -> list[tuple[str, nn.Module]]:
    """Return a twin of every model of transformers in a module that is not part of another one.

    Its modules have the classes of before `fully_shard`, no wrappers around them, and the attributes of those that
    they are twins of, but for modules among these, which are twins too: what a class does to a twin, to tie its weights
    say, does not reach the module. None of them is initialized, and no code of a model is run.

    Args:
        model: The module, wrapped or not.
        original: Returns what was in the place of a module before something else was put there, as PEFT does.

    Returns:
        Pairs of a name, without wrapper segments and with a trailing dot unless it is empty, and a twin. Nothing where
        transformers was not imported, since then there are no such models.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    twins: list[tuple[str, nn.Module]] = []
    for name, module in clean_modules(model):
        is_inner = any(name.startswith(path) for path, _ in twins)
        if isinstance(module, modeling.PreTrainedModel) and not is_inner:
            made: dict[int, nn.Module] = {}
            twins.append((name, _twin_of(module, original, made)))
            for twin in made.values():
                parts = vars(twin)
                parts.update({key: _with_twins(value, made) for key, value in parts.items() if key not in _REGISTERED})
    return twins


def _twin_of(module: nn.Module, original: _Original, made: dict[int, nn.Module]) -> nn.Module:
    """Copy a tree of modules without values, as it was before wrappers and `fully_shard`; no tensor of it is tied."""
    module = _unwrapped(original(_unwrapped(module)))
    if id(module) in made:
        return made[id(module)]
    is_script = isinstance(module, torch.jit.ScriptModule)  # has no class of its own
    twin: nn.Module = object.__new__(nn.Module if is_script else model_class(module))
    nn.Module.__init__(twin)
    made[id(module)] = twin
    # Not by `setattr`, of which a class may have its own idea.
    parts = vars(twin)
    parts.update({name: value for name, value in vars(module).items() if name not in parts})
    for name, child in module._modules.items():  # noqa: SLF001
        parts["_modules"][name] = None if child is None else _twin_of(child, original, made)
    for kind in ("_parameters", "_buffers"):
        for name, tensor in getattr(module, kind).items():
            parts[kind][name] = None if tensor is None else _on_meta(tensor)
    return twin


def _with_twins(value: object, made: Mapping[int, nn.Module]) -> object:
    """Return an attribute with twins in the place of modules, which a class may keep in a list beside those it has."""
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    if type(value) in {list, tuple} and any(isinstance(item, nn.Module) for item in value):  # type: ignore[attr-defined]
        return type(value)(_with_twins(item, made) for item in value)  # type: ignore[attr-defined, call-arg]
    if type(value) is dict and any(isinstance(item, nn.Module) for item in value.values()):
        return {key: _with_twins(item, made) for key, item in value.items()}
    return value


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    value = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what DDP, `torch.compile` and checkpointing wrap."""
    while True:
        children = [(name, child) for name, child in module._modules.items() if child is not None]  # noqa: SLF001
        if len(children) != 1 or strip_wrappers(
            f"{children[0][0]}.", [""] * isinstance(module, DistributedDataParallel)
        ):
            return module
        module = children[0][1]
