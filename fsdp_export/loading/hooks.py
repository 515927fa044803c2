"""Tensors that hooks make as a state dict is taken: they are loaded through the module's own `load_state_dict`.

Of a projection that torchtitan has fused, say, the state dict has the parts, and a hook of the module puts them
together again as they are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compat import local_of
from ..conversion.trace import storage_of
from ..errors import SourceError
from ..memory import bytes_of
from ..names import strip_wrappers
from ..sources.live import ddp_modules
from .materializing import own_tensors

__all__ = ["MadeByHooks", "check_hooks"]

_FIX = "Take away the hook that makes it, or register one that undoes it as the module is loaded"


class MadeByHooks:
    """Some tensors of a module's state dict, to be filled and loaded. Collective where the hooks are.

    Args:
        model: The module.
        names: Which, without the segments of wrappers.

    Attributes:
        locals_: This rank's blocks, by name; memory of their own.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._model = model
        self._tensors: dict[str, torch.Tensor] = {}
        self.locals_: dict[str, torch.Tensor] = {}
        wrappers = ddp_modules(model) if names else []
        for raw_name, value in model.state_dict(keep_vars=True).items() if names else ():
            name = strip_wrappers(raw_name, wrappers)
            if name in names:
                self._tensors[raw_name] = value.resolve_conj().resolve_neg() if _is_lazy(value) else value.detach()
                self.locals_[name] = local_of(self._tensors[raw_name])

    def load(self) -> list[str]:
        """Hand the tensors to the module; return what it does not know of these, or of what its hooks make of them."""
        taken: Any = self._model.load_state_dict(dict(self._tensors), strict=False)
        return [strip_wrappers(name) for name in taken.unexpected_keys]

    def load_new(self, old: Mapping[str, torch.Tensor]) -> None:
        """Hand the tensors to the module, and look whether it has taken them.

        Args:
            old: What they were before.

        Raises:
            SourceError: It still has one as it was.
        """
        self.load()
        found = MadeByHooks(self._model, self.locals_.keys()).locals_
        for name, value in self.locals_.items():
            if torch.equal(bytes_of(found[name]), bytes_of(old[name])) and not _are_close(found[name], value):
                raise _refusal(name, "the values from before loading")


@torch.no_grad()
def check_hooks(model: nn.Module, names: Collection[str]) -> None:
    """Refuse tensors of a state dict that cannot be loaded again. Collective where the hooks are.

    The module is given what it has; if that changes anything, what it had is put back.

    Args:
        model: The module.
        names: What hooks make.

    Raises:
        SourceError: The module does not know one, or has something else of it afterwards.
    """
    if not names:
        return
    values = model.state_dict(keep_vars=True).values()
    seen = {storage_of(local_of(value)) for value in values if isinstance(value, torch.Tensor)}
    behind = [local_of(tensor) for _, _, _, tensor in own_tensors(model) if storage_of(local_of(tensor)) not in seen]
    if any(local.is_meta for local in behind):
        what = "a tensor in the state dict of the module that a hook makes of one on the meta device,"
        raise SourceError(what, name=min(names), fix="Call to_empty() before loading")
    kept = [local.clone() for local in behind]
    made = MadeByHooks(model, names)
    wanted = {name: local.clone() for name, local in made.locals_.items()}
    try:
        unknown = made.load()
        changed = "" if unknown else _changed(MadeByHooks(model, names).locals_, wanted)
    except Exception as error:
        _put_back(behind, kept)
        raise _refusal(min(names), f"{type(error).__name__}: {error}") from error
    if unknown or changed:
        _put_back(behind, kept)
    if unknown:
        raise _refusal(unknown[0], "a name that load_state_dict does not know")
    if changed:
        raise _refusal(changed, "other values once these were loaded")


def _put_back(locals_: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for local, value in zip(locals_, values, strict=True):
        local.copy_(value)


def _refusal(name: str, found: str) -> SourceError:
    what = "a copy in the state dict of the module, into which nothing can be loaded,"
    return SourceError(what, name=name, found=found, fix=_FIX)


def _changed(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """Return the name of a tensor whose bytes differ, or nothing."""
    different = (name for name, value in expected.items() if not torch.equal(bytes_of(found[name]), bytes_of(value)))
    return next(different, "")


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether values are the same but for a dtype that a hook may have rounded them to, be it of 8 bits."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    return torch.allclose(one.to(wide), other.to(wide), rtol=2**-3, atol=1e-5, equal_nan=True)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return type(tensor) in {torch.Tensor, nn.Parameter} and (tensor.is_conj() or tensor.is_neg())
