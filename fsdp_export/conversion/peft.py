"""LoRA adapters as PEFT has them: which state dict is one, and what its tensors tell of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike

from ..errors import SourceError
from ..spec import TensorInfo
from ..table import counted
from .peft_names import (
    ADAPTER_SEGMENT,
    BASE,
    ORIGINAL,
    PREFIX,
    PeftName,
    chosen_adapter,
    is_embedding,
    parse,
    refuse_kind,
)

__all__ = ["LoraAdapter", "inspect_lora", "lora_names", "parents"]

_LAYER = re.compile(r"(?P<stack>.*?\.)??(?P<index>\d{1,6})\.(?P<inside>.+)")
_PARTNERS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_MIN_DIMS = 2


@dataclass(frozen=True)
class LoraAdapter:
    """What the tensors of an adapter tell.

    Attributes:
        ranks: The rank of every module that has LoRA.
        saved_modules: The modules that are stored whole.
        bias: Of which modules the base model's biases are stored, in PEFT's words: none, lora_only, all.
        has_magnitudes: Whether it is DoRA.
        has_lora_bias: Whether its second matrix has a bias.
    """

    ranks: Mapping[str, int]
    saved_modules: tuple[str, ...]
    bias: str
    has_magnitudes: bool
    has_lora_bias: bool

    def __str__(self) -> str:
        low, high = min(self.ranks.values()), max(self.ranks.values())
        ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
        modules = counted(len(self.ranks), "module")
        return f"{'DoRA' if self.has_magnitudes else 'LoRA'} adapter of {ranks} on {modules}"

    @property
    def usual_rank(self) -> int:
        """The rank that most modules have."""
        counts = Counter(self.ranks.values())
        return min(counts, key=lambda rank: (-counts[rank], rank))

    @property
    def fused_modules(self) -> list[str]:
        """Modules of which not a weight but a parameter of experts has LoRA; names do not tell which parameter."""
        return [module for module in self.ranks if module.endswith((".experts", BASE)) or module == "experts"]

    def rank_pattern(self, usual_rank: int) -> dict[str, int]:
        """Return the ranks of modules that have another one, by patterns that PEFT matches with the end of names."""
        ranks_of: dict[str, set[int]] = {}
        for module, rank in self.ranks.items():
            ranks_of.setdefault(_last(module), set()).add(rank)
        return {
            re.escape(_last(module) if len(ranks_of[_last(module)]) == 1 else module): rank
            for module, rank in self.ranks.items()
            if rank != usual_rank
        }

    def target_modules(self, num_layers: int | None) -> list[str]:
        """Return what PEFT has to match with the end of names to find these modules and no others.

        Args:
            num_layers: How many layers the base model has in its only stack; None if that is not known. Modules that
                all layers have are named once, without their layer.
        """
        layers: dict[str, set[tuple[str, str]]] = {}
        inside_of: dict[str, str] = {}
        for module in self.ranks:
            if match := _LAYER.fullmatch(module):
                inside_of[module] = match["inside"]
                layers.setdefault(match["inside"], set()).add((match["stack"] or "", match["index"]))
        in_all = {inside for inside, places in layers.items() if _are_all_layers(places, num_layers)}
        return sorted({inside if (inside := inside_of.get(module)) in in_all else module for module in self.ranks})


def lora_names(names: Collection[str], file: str | PathLike[str]) -> dict[str, str] | None:
    """Find out whether a state dict is an adapter, and name its tensors as PEFT does.

    It is one if it has LoRA and no weight of a module that has it. What else is in it are modules that are stored
    whole; only where PEFT's prefix or its `modules_to_save` tells so.

    Args:
        names: All names.
        file: Where they come from, for messages.

    Returns:
        PEFT's name of every tensor, and the name that it has; without tensors of other adapters than the one called
        default, and without the base model's own copies of modules that are stored whole. None for a model.

    Raises:
        UsageError: There are several adapters, and none is called default.
        SourceError: It is an adapter of another kind, or two names become one.
    """
    parsed = {name: parse(name) for name in names}
    if not _is_lora(parsed):
        return None
    base = {name for name, parts in parsed.items() if not parts.part and not parts.adapter}
    refuse_kind(list(filter(ADAPTER_SEGMENT.fullmatch, base)), file)
    adapters = {parts.adapter for parts in parsed.values() if parts.adapter}
    others = adapters - {chosen_adapter(adapters, file)}
    renamed: dict[str, str] = {}
    for name, parts in parsed.items():
        if parts.adapter in others or ORIGINAL in name:
            continue
        if str(parts) in renamed:
            found = f"{renamed[str(parts)]!r} and {name!r}"
            fix = "Save the state dict of one model"
            raise SourceError("two keys become one name", name=str(parts), file=file, found=found, fix=fix)
        renamed[str(parts)] = name
    return renamed


def inspect_lora(tensors: Iterable[TensorInfo], file: str | PathLike[str]) -> LoraAdapter:
    """Find out what the tensors of an adapter tell.

    Args:
        tensors: The tensors, under PEFT's names.
        file: Where they come from, for messages.

    Raises:
        SourceError: A module has half of an adapter, or matrices that do not fit each other.
    """
    lora: dict[str, dict[str, TensorInfo]] = {}
    leaves_of: dict[str, set[str]] = {}
    for tensor in tensors:
        name = parse(tensor.name)
        if name.part:
            lora.setdefault(name.module, {})[name.part + (".bias" if name.leaf == "bias" else "")] = tensor
        else:
            leaves_of.setdefault(name.module, set()).add(name.leaf)
    of_base = {module for module in leaves_of if module.removesuffix(BASE) in lora}
    biases = {module.removesuffix(BASE) for module, leaves in leaves_of.items() if leaves == {"bias"}}
    saved = leaves_of.keys() - of_base - biases
    bias = "none" if not biases else "lora_only" if biases <= lora.keys() else "all"
    return LoraAdapter(
        {module: _rank(parts, file) for module, parts in lora.items()},
        tuple(sorted(module for module in saved if saved.isdisjoint(parents(module)))),
        bias,
        has_magnitudes=any("lora_magnitude_vector" in parts for parts in lora.values()),
        has_lora_bias=any("lora_B.bias" in parts for parts in lora.values()),
    )


def parents(module: str) -> list[str]:
    """Return the modules that a module lies in, the outermost first."""
    segments = module.split(".")
    return [".".join(segments[:end]) for end in range(1, len(segments))]


def _is_lora(parsed: Mapping[str, PeftName]) -> bool:
    matrices = {name for name in parsed if ADAPTER_SEGMENT.fullmatch(name)}
    linear = {parts.module for parts in parsed.values() if parts.part in {"lora_A", "lora_B"}}
    embeddings = {parts.module for parts in parsed.values() if parts.part.startswith("lora_embedding_")}
    has_base, unmarked = False, False
    for name, parts in parsed.items():
        owner = parts.module.removesuffix(BASE)
        if name in matrices or parts.adapter or ORIGINAL in name or (owner in linear and parts.leaf == "bias"):
            continue
        is_stored = owner in embeddings or (owner in linear and is_embedding(owner))
        if is_stored and owner != parts.module:  # PEFT stores the weight of an embedding or head that has LoRA as well
            has_base = True
        elif owner in linear or owner in embeddings or owner != parts.module:
            return False
        else:
            unmarked = True
    is_of_peft = not has_base and all(name.startswith(PREFIX) for name in parsed)
    return bool(matrices) and (is_of_peft or not unmarked)


def _rank(parts: Mapping[str, TensorInfo], file: str | PathLike[str]) -> int:
    """Return the rank of a module's matrices, which must be two that fit."""
    for first, second in _PARTNERS.items():
        if first not in parts and second not in parts:
            continue
        one, other = parts.get(first), parts.get(second)
        if one is None or other is None:
            has, lacks = (first, second) if other is None else (second, first)
            fix = "Use a checkpoint that has both"
            name = next(iter(parts.values())).name
            raise SourceError("half of an adapter", name=name, file=file, expected=lacks, found=f"only {has}", fix=fix)
        if min(len(one.shape), len(other.shape)) < _MIN_DIMS or one.shape[0] != other.shape[1]:
            raise SourceError(
                "matrices of an adapter that do not fit",
                name=one.name,
                file=file,
                expected="as many rows as the other has columns",
                found=f"{list(one.shape)} and {list(other.shape)}",
                fix="Save full tensors, or DTensors",
            )
        return one.shape[0]
    name = next(iter(parts.values())).name
    raise SourceError(
        "half of an adapter", name=name, file=file, expected="lora_A and lora_B", fix="Use a checkpoint that has both"
    )


def _are_all_layers(places: Collection[tuple[str, str]], num_layers: int | None) -> bool:
    is_one_stack = len({stack for stack, _ in places}) == 1
    return is_one_stack and len(places) == num_layers and {int(index) for _, index in places} == set(range(num_layers))


def _last(module: str) -> str:
    return module.rpartition(".")[2]
