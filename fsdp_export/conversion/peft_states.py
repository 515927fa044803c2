"""A state dict of a PEFT model on disk: the base model's weights, and LoRA beside them.

Names and shapes tell which matrices belong to which weight; what their product is multiplied by, PEFT's config does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any

import torch

from ..errors import SourceError, listing
from ..spec import TensorInfo, TensorSpec
from .lora_view import LoraView
from .low_rank import Update
from .peft_names import (
    BASE,
    ORIGINAL,
    PREFIX,
    adapter_names,
    chosen_adapter,
    parse,
    refuse_kind,
)
from .updates import ALONE, Factors, bias_update, fits, weight_update

__all__ = ["PeftState", "find_peft_state"]

# What PEFT calls LoRA, and merges otherwise or not at all.
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
_OWN = re.compile(r"(?:^|\.)(?:lora_|trainable_tokens_delta(?:\.|$))")
_MAX_QUANTIFIERS = 2
_MAX_PATTERN = 500
_EXPERT_DIMS = 3


def find_peft_state(specs: Sequence[TensorSpec], file: str | PathLike[str]) -> PeftState | None:
    """Return what PEFT has made of a state dict that has the base model's weights; None if it has made nothing of it.

    Args:
        specs: The tensors, which are no adapter alone.
        file: Where they come from, for messages.

    Raises:
        UsageError: There are several adapters, and none is called default.
        SourceError: It has adapters of another kind.
    """
    names = [spec.name for spec in specs]
    has_parts = any(parts.part or parts.adapter for parts in map(parse, names))
    is_of_peft = has_parts or any(name.startswith(PREFIX) and f"{BASE}." in name for name in names)
    return PeftState(specs, file) if is_of_peft else None


class PeftState:
    """The tensors of a PEFT model, and the adapter among them that counts.

    Args:
        specs: The tensors.
        file: Where they come from, for messages.

    Attributes:
        adapter: What that is called; empty where names do not tell.
        other_adapters: Those that do not count.

    Raises:
        UsageError: There are several adapters, and none is called default.
        SourceError: There are adapters of another kind.
    """

    def __init__(self, specs: Sequence[TensorSpec], file: str | PathLike[str]) -> None:
        self._specs, self._file = {spec.name: spec for spec in specs}, file
        self._parsed = {name: parse(name) for name in self._specs}
        refuse_kind(self._of_other_kinds(), file, "Keep the names that the tensors have with --lora keep")
        adapters = {parts.adapter for parts in self._parsed.values() if parts.adapter}
        self.adapter = chosen_adapter(adapters, file)
        self.other_adapters = sorted(adapters - {self.adapter})
        self._names = {name: self._base_name(name) for name in self._specs}
        self._refuse_two_of_a_name()

    def adapter_names(self, bias: str = "none") -> dict[str, str]:
        """Return PEFT's names of the adapter's tensors, and the names that they have; `bias` as in PEFT's config."""
        return adapter_names(self._specs, self.adapter, bias)

    def adapter_tensors(self) -> list[TensorInfo]:
        """Return the adapter's tensors under PEFT's names."""
        names = self.adapter_names().items()
        return [TensorInfo(new, self._specs[old].shape, self._specs[old].dtype) for new, old in names]

    def merged(
        self,
        config: Mapping[str, Any],
        device: torch.device,
        are_transposed: Callable[[str], bool | None] = lambda _: None,
    ) -> LoraView:
        """Return the tensors of the base model with the adapter merged.

        Args:
            config: PEFT's config of the adapter.
            device: Where to merge.
            are_transposed: Tells of a module of the base model whether its weight, or those of its experts, are
                transposed; None where that is not known.

        Raises:
            SourceError: Something cannot be merged.
        """
        for key in _VARIANTS:
            if config.get(key):
                what = "a kind of LoRA that cannot be merged"
                raise SourceError(what, file=self._file, found=f"{key} in its config", fix=ALONE)
        origins = {base: self._specs[name] for name, base in self._names.items() if base is not None}
        updates: dict[str, list[Update]] = {}
        for module, parts in self._lora.items():
            for update in self._updates(module, parts, config, are_transposed):
                base = self._names[update.weight.name]
                assert base is not None
                updates.setdefault(base, []).append(update)
        return LoraView("merge", origins, updates, device)

    @cached_property
    def _lora(self) -> dict[str, dict[str, str]]:
        """The names of the adapter's parts, by modules under their full names."""
        modules: dict[str, dict[str, str]] = {}
        for name, parts in self._parsed.items():
            if parts.part and parts.adapter == self.adapter:
                key = parts.part + (".bias" if parts.leaf == "bias" else "")
                modules.setdefault(parts.module, {})[key] = name
        return modules

    def _updates(
        self,
        module: str,
        parts: Mapping[str, str],
        config: Mapping[str, Any],
        are_transposed: Callable[[str], bool | None],
    ) -> Iterator[Update]:
        is_embedding = "lora_embedding_A" in parts
        prefix = "lora_embedding_" if is_embedding else "lora_"
        first, second = parts[f"{prefix}A"], parts[f"{prefix}B"]
        root = _without_base(module)
        weight = self._weight(root)
        if weight is not None:
            scaling = self._scaling(config, root, self._specs[first].shape[0])
            # PEFT keeps one flag for all layers, that of the last one, where a model has linear ones of both kinds.
            is_transposed = are_transposed(root)
            if is_transposed is None:
                is_transposed = bool(config.get("fan_in_fan_out"))
            factors = Factors(
                first,
                second,
                scaling,
                parts.get("lora_magnitude_vector"),
                is_transposed=is_embedding or is_transposed,
                is_embedding=is_embedding,
            )
            yield weight_update(self._specs, weight, factors, self._file)
            if "lora_B.bias" in parts:
                yield bias_update(
                    self._specs, weight.removesuffix("weight") + "bias", parts["lora_B.bias"], scaling, self._file
                )
            return
        weight = self._parameter(module, root, first, second)
        shape = self._specs[weight].shape
        rank = self._specs[first].shape[0] // (shape[0] if len(shape) == _EXPERT_DIMS else 1)
        scaling = self._scaling(config, self._names[weight] or root, rank)
        factors = Factors(first, second, scaling, None, are_transposed(root), has_experts=True)
        yield weight_update(self._specs, weight, factors, self._file)

    def _weight(self, root: str) -> str | None:
        """Return the weight of a module that has LoRA, by the module's name in the base model; None if it has none."""
        return next((name for name in self._below(root) if self._names[name] == f"{root}.weight"), None)

    def _parameter(self, module: str, root: str, first: str, second: str) -> str:
        """Find the parameter of experts that matrices are for: the only one that they fit."""
        fitting = [name for name in self._below(root) if fits(*(self._specs[each] for each in (name, first, second)))]
        if len(fitting) != 1:
            what = "matrices of LoRA that fit no weight" if not fitting else "matrices of LoRA that fit several weights"
            raise SourceError(
                what,
                name=first,
                file=self._file,
                expected=f"a weight of {module}",
                found=listing(fitting) or "none",
                fix=ALONE,
            )
        return fitting[0]

    def _below(self, root: str) -> list[str]:
        """Return the tensors that a module of the base model has itself."""
        return self._children.get(root, [])

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for name, base in self._names.items():
            if base is not None:
                children.setdefault(base.rpartition(".")[0], []).append(name)
        return children

    def _scaling(self, config: Mapping[str, Any], module: str, rank: int) -> float:
        patterns = config.get("alpha_pattern")
        alphas = patterns.items() if isinstance(patterns, dict) else ()
        alpha = next((alpha for pattern, alpha in alphas if self._matches(pattern, module)), config["lora_alpha"])
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise SourceError("an alpha that is no number", name=module, file=self._file, found=alpha, fix=ALONE)
        rank = max(rank, 1)  # none is refused with the shapes
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _matches(self, pattern: str, module: str) -> bool:
        """Tell whether a pattern is for a module, as PEFT matches it; one that might take for ever is not tried."""
        bare = re.sub(r"\\.", "", pattern)
        num_quantifiers = len(re.findall(r"[*+{]", bare))
        is_tame = len(pattern) <= _MAX_PATTERN and num_quantifiers <= _MAX_QUANTIFIERS
        try:
            if is_tame and not re.search(r"\)[*+{?]|\(\?|\\[0-9]", pattern):
                return re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error:
            pass
        what = "a pattern in alpha_pattern that is not tried, for it may never end,"
        raise SourceError(what, name=module, file=self._file, found=repr(pattern[:_MAX_PATTERN]), fix=ALONE)

    def _base_name(self, name: str) -> str | None:
        """Return what the merged model calls a tensor; None if it has none of it."""
        parts = self._parsed[name]
        if parts.part or parts.adapter not in {"", self.adapter}:
            return None
        base = f"{parts.module}.{parts.leaf}" if parts.adapter else name.removeprefix(PREFIX)
        module, is_original, leaf = base.partition(ORIGINAL)
        if is_original:
            if module in self._saved:
                return None
            base = f"{module}.{leaf}"
        return _without_base(base)

    @cached_property
    def _saved(self) -> set[str]:
        """The modules that the adapter has a copy of."""
        return {
            name.removeprefix(PREFIX).partition(".modules_to_save.")[0]
            for name, parts in self._parsed.items()
            if not parts.part and parts.adapter == self.adapter and self.adapter
        }

    def _refuse_two_of_a_name(self) -> None:
        taken: dict[str, str] = {}
        for name, base in self._names.items():
            if base is not None and taken.setdefault(base, name) != name:
                found = f"{taken[base]!r} and {name!r}"
                fix = "Save the state dict of one model"
                raise SourceError("two keys become one name", name=base, file=self._file, found=found, fix=fix)

    def _of_other_kinds(self) -> list[str]:
        """Return tensors of adapters of other kinds: what stands beside a base layer, or is one, without LoRA."""
        owners = {module for name in self._specs for module in _owners(name)}
        adapted = {parts.module for parts in self._parsed.values() if parts.part}
        plain = [name for name, parts in self._parsed.items() if not parts.part]
        beside = [name for name in plain if not _owners(name) and (_parents(name) & owners or _OWN.search(name))]
        return beside or [name for name in plain if any(owner not in adapted for owner in _owners(name))]


def _owners(name: str) -> list[str]:
    """Return the modules in a name that have a base layer."""
    segments = name.removeprefix(PREFIX).split(".")
    return [".".join(segments[:place]) for place, segment in enumerate(segments) if segment == BASE[1:]]


def _parents(name: str) -> set[str]:
    segments = name.removeprefix(PREFIX).split(".")
    return {".".join(segments[:end]) for end in range(1, len(segments))}


def _without_base(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment != BASE[1:])
