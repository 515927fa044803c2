"""The module that is loaded: its tensors under the names that a checkpoint may have for them, and its ties."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..conversion.adapter import reversal_of
from ..conversion.aliases import clean_modules, find_aliases, unsaved_names
from ..conversion.cut import Conversion
from ..conversion.loading import Loaded, Loader, loader_of
from ..conversion.peft_module import PeftModule, base_twins, find_peft
from ..conversion.peft_names import ADAPTER_SEGMENT
from ..conversion.transformers import convert_live
from ..errors import PlanError, UsageError
from ..names import strip_wrappers
from ..sources.live import LiveSource, named_tensors
from ..spec import TensorSpec
from ..ties import live_ties

__all__ = ["Target", "target_of"]

# Buffers that older versions of many classes saved. Each version of transformers passes over them.
_FORMER_BUFFERS = ("inv_freq", "position_ids")


@dataclass(frozen=True)
class Target:
    """What a checkpoint is loaded into.

    Attributes:
        specs: The tensors by the names that they have here, each parameter once; their own are those of the module.
        aliases: Further names of tied parameters, and the name in `specs`.
        declared: Names of parameters of their own that the config declares to be tied to others.
        optional: Names that a checkpoint may lack: what a class computes anew, and the model that an adapter is for.
        ignored: Regular expressions of names of a checkpoint that are of no concern.
        buffers: Names of buffers that no checkpoint should hold.
        live: The tensors as they are now.
        load: Makes of the tensors of a checkpoint, or of some, those of the module.
        hub: What an export makes of the tensors; None where they stay.
        keeps_names: Whether names of a checkpoint are these, whatever else they could be.
        only_moves: Whether `load` computes nothing: an adapter may, transformers does not.
    """

    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    declared: Mapping[str, str]
    optional: frozenset[str]
    ignored: tuple[str, ...]
    buffers: frozenset[str]
    live: LiveSource
    load: Loader
    hub: Conversion | None = None
    keeps_names: bool = False
    only_moves: bool = True

    @property
    def names(self) -> set[str]:
        """All names of the module's tensors."""
        return {*self.specs, *self.aliases}

    def is_ignored(self, name: str) -> bool:
        """Tell whether a name of a checkpoint for which there is no tensor is of no concern."""
        is_buffer = name in self.buffers or name.rpartition(".")[2] in _FORMER_BUFFERS
        return is_buffer or any(re.search(each, name) for each in self.ignored)


def target_of(model: nn.Module, names: Collection[str], adapter: Any = None) -> Target:
    """Look at a module, which may be on meta. Local.

    Args:
        model: The module.
        names: The names of a checkpoint, which tell, of a PEFT model, what of it that holds.
        adapter: What turns names and tensors of Hugging Face into those of the module; see `reversal_of`.

    Raises:
        SourceError: The module is not understood; see `LiveSource`.
        UsageError: The adapter is none; or the module is one of PEFT whose adapters are merged.
    """
    source = LiveSource(model, may_be_meta=True)
    own = {spec.name: spec for spec in source.specs}
    peft = find_peft(model)
    if peft is not None:
        return _peft_target(model, peft, source, names)
    ties = live_ties(model)
    specs = {name: spec for name, spec in own.items() if name not in ties.aliases}
    declared = {alias: ties.aliases.get(kept, kept) for alias, kept in ties.broken.items()}
    unsaved = unsaved_names(model)
    optional = unsaved | _matching(specs, _declared(model, "_keys_to_ignore_on_load_missing"))
    load = loader_of(base_twins(model, None), own) if adapter is None else _loader_by(adapter, own)
    hub = _export(model, [spec for name, spec in specs.items() if name not in unsaved])
    ignored = _ignored(model, own)
    only_moves = adapter is None
    return Target(
        specs, ties.aliases, declared, frozenset(optional), *ignored, source, load, hub, only_moves=only_moves
    )


def _peft_target(model: nn.Module, peft: PeftModule, source: LiveSource, names: Collection[str]) -> Target:
    """Return the adapter alone, all that PEFT has, or the model that it adapts: what a checkpoint has the names of."""
    if peft.merged_layers:
        raise UsageError(
            "weights that have an adapter in them, which would be taken out of others after loading",
            name=peft.merged_layers[0],
            fix="Call unmerge_adapter() first",
        )
    tensors, own = named_tensors(model), {spec.name: spec for spec in source.specs}
    has_adapter = any(map(ADAPTER_SEGMENT.match, names))
    if has_adapter and not own.keys() >= set(names):
        seen = dict(peft.adapter(source.specs, source.device).origins)
    elif has_adapter:
        seen = own
    else:
        seen = {base: spec for name, spec in own.items() if (base := peft.base_name(name)) is not None}
    aliases = find_aliases({name: tensors[spec.name] for name, spec in seen.items()}, peft.base)
    specs = {name: spec for name, spec in seen.items() if name not in aliases}
    twins = base_twins(model, peft) if not has_adapter else []
    return Target(
        specs,
        aliases,
        {},
        frozenset(unsaved_names(peft.base)),
        *_ignored(model, own),
        source,
        loader_of(twins, seen),
        keeps_names=has_adapter,
    )


def _export(model: nn.Module, specs: list[TensorSpec]) -> Conversion | None:
    """Return what an export would make of a module: by which names a checkpoint would have its tensors."""
    try:
        return convert_live(model, specs)
    except PlanError:
        return None


def _loader_by(adapter: Any, own: Collection[str]) -> Loader:
    convert = reversal_of(adapter)

    def load(tensors: dict[str, torch.Tensor]) -> Loaded:
        given = {name: tensor for name, tensor in tensors.items() if name not in own}
        kept = {name: tensor for name, tensor in tensors.items() if name in own}
        return Loaded({**(convert(given) if given else {}), **kept})

    return load


def _ignored(model: nn.Module, own: Collection[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return which names of a checkpoint are of no concern: patterns, and buffers that are not persistent."""
    buffers = {strip_wrappers(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return tuple(_declared(model, "_keys_to_ignore_on_load_unexpected")), frozenset(buffers.difference(own))


def _declared(model: nn.Module, attribute: str) -> list[str]:
    """Collect the regular expressions that transformers classes, at any depth, declare."""
    return sorted({key for _, module in clean_modules(model) for key in getattr(module, attribute, None) or ()})


def _matching(names: Collection[str], patterns: Collection[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
