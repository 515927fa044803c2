"""How transformers loads a checkpoint: from the names and tensors of files to those of the modules of a model.

The way back of `transformers.py`: what it says of twins, and of versions 4 and 5, holds here too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Loaded", "Loader", "loader_of"]


_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Loaded:
    """What was made of the tensors of a checkpoint.

    Attributes:
        tensors: Tensors of the modules by their names.
        failed: Names of tensors of the modules that could not be made, and why.
        unknown: Names of the checkpoint that no module has a tensor for.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of a module, which only one tensor of the checkpoint may be."""
        if name in self.tensors:
            self.failed[name] = "several tensors of the checkpoint are this one"
        self.tensors[name] = tensor


Loader = Callable[[dict[str, torch.Tensor]], Loaded]
"""Makes of the tensors of a checkpoint, or of a part of one, those of the modules."""


def loader_of(twins: Sequence[tuple[str, nn.Module]], names: Iterable[str]) -> Loader:
    """Return what transformers does to the tensors of a checkpoint for the models of it in a module.

    Args:
        twins: Their twins, by the names that the models have in the module.
        names: The names of the module's tensors.
    """
    own = frozenset(names)
    # A module may leave the name of what it wraps out of its state dict.
    loaders = [(path if any(name.startswith(path) for name in own) else "", _loader(twin)) for path, twin in twins]

    def load(tensors: dict[str, torch.Tensor]) -> Loaded:
        loaded, rest = Loaded(), dict(tensors)
        for prefix, load_below in loaders:
            below = {name: rest.pop(name) for name in tensors if name in rest and name.startswith(prefix)}
            made = load_below({name.removeprefix(prefix): tensor for name, tensor in below.items()})
            for name, tensor in made.tensors.items():
                loaded.put(prefix + name, tensor)
            loaded.failed.update({prefix + name: why for name, why in made.failed.items()})
            loaded.unknown.extend(prefix + name for name in made.unknown)
        for name, tensor in rest.items():
            if name in own:
                loaded.put(name, tensor)
            else:
                loaded.unknown.append(name)
        return loaded

    return load


def _loader(twin: Any) -> Loader:
    """Return what transformers does for one model."""
    own = twin.state_dict(keep_vars=True)
    try:
        from transformers import core_model_loading as core
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return lambda tensors: _renamed(tensors, _former_renaming(twin, own))
    prefix: str | None = getattr(twin, "base_model_prefix", "") or None

    def load(tensors: dict[str, torch.Tensor]) -> Loaded:
        changes: list[Any] = get_model_conversion_mapping(twin)
        renamings = [change for change in changes if isinstance(change, core.WeightRenaming)]
        converters = [change for change in changes if isinstance(change, core.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        loaded, groups = Loaded(), dict[str, Any]()
        members: dict[str, list[str]] = defaultdict(list)
        for name in sorted(tensors, key=core.dot_natural_key):
            target, pattern = core.rename_source_key(name, renamings, converters, prefix, own)
            if target not in own and name in own:
                target, pattern = name, None
            if target not in own:
                loaded.unknown.append(name)
            elif pattern is None:
                loaded.put(target, tensors[name])
            else:
                if target not in groups:
                    groups[target] = deepcopy(by_pattern[pattern])
                groups[target].add_tensor(target, name, pattern, tensors[name])
                members[target].append(name)
        for target, group in groups.items():
            _convert(group, target, twin, loaded)
            if target in loaded.failed:
                loaded.failed[target] += _odd_one({name: tensors[name] for name in members[target]})
        return loaded

    return load


def _convert(group: Any, target: str, twin: Any, loaded: Loaded) -> None:
    """Make of what belongs together the tensors of the modules."""
    num_tensors = sum(map(len, group.collected_tensors.values()))
    try:
        made: Mapping[str, Any] = group.convert(target, model=twin, config=twin.config)
    except Exception as error:  # noqa: BLE001  whatever the conversion of a class raises, it is told with all else
        loaded.failed[target] = f"{type(error).__name__} when it is made of {num_tensors:,} tensors: {error}"
        return
    for name, tensor in made.items():
        loaded.put(name, tensor[0] if isinstance(tensor, list) else tensor)


def _odd_one(tensors: Mapping[str, torch.Tensor]) -> str:
    """Name the first tensor of another shape than most have whose names differ in a number alone."""
    shapes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for name, tensor in tensors.items():
        shapes[_NUMBER.sub("#", name)][tuple(tensor.shape)] += 1
    for name, tensor in tensors.items():
        ((usual, _),) = shapes[_NUMBER.sub("#", name)].most_common(1)
        if tuple(tensor.shape) != usual:
            return f"; {name}: expected {list(usual)}, found {list(tensor.shape)}"
    return ""


def _renamed(tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str | None]) -> Loaded:
    loaded = Loaded()
    for name, tensor in tensors.items():
        target = rename(name)
        if target is None:
            loaded.unknown.append(name)
        else:
            loaded.put(target, tensor)
    return loaded


def _former_renaming(twin: Any, own: Mapping[str, object]) -> Callable[[str], str | None]:
    """Return how transformers 4 renames: some models by patterns, all by the name that a base model has in them."""
    patterns: Mapping[str, str] = getattr(twin, "_checkpoint_conversion_mapping", None) or {}
    prefix = f"{getattr(twin, 'base_model_prefix', '')}."

    def rename(name: str) -> str | None:
        hits = (re.subn(pattern, replacement, name) for pattern, replacement in patterns.items())
        renamed = next((text for text, num_hits in hits if num_hits), name)
        return next((each for each in (renamed, prefix + renamed, renamed.removeprefix(prefix)) if each in own), None)

    return rename
