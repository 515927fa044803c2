"""Tells cheaply whether a module's state dict would have the same tensors as before."""
# ruff: noqa: SLF001  what a module consists of has public names only through walks that take ten times as long

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Structure"]


class Structure:
    """What a module consisted of when this was made.

    Only modules are kept alive. A parameter that was replaced by one at the same address counts as the same here: look
    at what matters of it.

    Args:
        model: The module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._is_plain = all(map(_is_plain, self._modules))
        self._found = list(map(_parts, self._modules))
        self._places = {
            id(value): (values, name)
            for module in self._modules
            for values in (module._parameters, module._buffers)
            for name, value in values.items()
        }

    def is_unchanged(self) -> bool:
        """Tell whether every module has the same parameters, buffers and submodules under the same names.

        False where something other than torch has a say in the state dict.
        """
        return self._is_plain and all(
            _parts(module) == parts for module, parts in zip(self._modules, self._found, strict=True)
        )

    def tensor(self, identity: int) -> torch.Tensor | None:
        """Return the parameter or buffer of an id, of a structure that is unchanged; None if it has none."""
        place = self._places.get(identity)
        return place[0][place[1]] if place is not None else None


def _parts(module: nn.Module) -> tuple[Any, ...]:
    parameters, buffers, modules = module._parameters, module._buffers, module._modules
    names = (*parameters, *buffers, *modules, *module._non_persistent_buffers_set)
    values = (*map(id, parameters.values()), *map(id, buffers.values()), *map(id, modules.values()))
    return names, values, len(module._state_dict_hooks), len(module._state_dict_pre_hooks)


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return (
        all(getattr(kind, method) is getattr(nn.Module, method) for method in methods)
        and not module._state_dict_hooks
        and all(map(_is_of_torch, module._state_dict_pre_hooks.values()))
    )


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook is that of FSDP2, which reshards: what it would reshard is another parameter anyway."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.")
