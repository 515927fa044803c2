"""What PEFT calls its tensors.

In a live model, and in a state dict of one, names hold what the adapter is called (`q_proj.lora_A.default.weight`); on
disk they do not. What is trained beside the matrices, whole modules and biases, is stored under the names of the base
model, behind the same `base_model.model.`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike

from ..errors import SourceError, UsageError, listing

__all__ = [
    "ADAPTER_SEGMENT",
    "BASE",
    "ORIGINAL",
    "PREFIX",
    "PeftName",
    "adapter_names",
    "chosen_adapter",
    "is_embedding",
    "parse",
    "refuse_kind",
]

PREFIX = "base_model.model."
BASE = ".base_layer"
ORIGINAL = ".original_module."
ADAPTER_SEGMENT = re.compile(r"(?:.*\.)?(?:lora|adapter)_.*|.*\.trainable_tokens_delta(?:\..*)?")
"""A name that only adapters have, of LoRA or another kind."""

_DEFAULT = "default"
_TOKENS = re.compile(r"(?P<module>.+\.token_adapter)\.(?P<leaf>trainable_tokens_delta)\.(?P<adapter>[^.]+)")
_LORA = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!(?:weight|bias)(?:\.|$))[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)")


@dataclass(frozen=True, slots=True)
class PeftName:
    """A name, taken apart.

    Attributes:
        module: The module of the base model.
        part: What of LoRA it is; empty for a parameter of the base model itself.
        adapter: What the adapter is called; empty where the name does not tell.
        leaf: What follows.
    """

    module: str
    part: str
    adapter: str
    leaf: str

    def __str__(self) -> str:
        leaf = "" if self.part not in {"", "lora_A", "lora_B"} else self.leaf
        return PREFIX + ".".join(filter(None, (self.module, self.part, leaf)))


def parse(name: str) -> PeftName:
    """Take a name apart."""
    name = name.removeprefix(PREFIX)
    if match := _SAVED.fullmatch(name):
        return PeftName(match["module"], "", match["adapter"], match["leaf"])
    if match := _LORA.fullmatch(name):
        return PeftName(match["module"], match["part"], match["adapter"] or "", match["leaf"] or "")
    module, _, leaf = name.rpartition(".")
    return PeftName(module, "", "", leaf)


def chosen_adapter(adapters: Collection[str], file: str | PathLike[str]) -> str:
    """Choose one adapter of a state dict: the only one, or the one called default; empty where names do not tell.

    Raises:
        UsageError: There are several, and none is called default.
    """
    if len(adapters) > 1 and _DEFAULT not in adapters:
        fix = "Save a state dict that has only the one that is meant"
        expected = "one, or one called default"
        raise UsageError("several adapters", file=file, expected=expected, found=listing(adapters), fix=fix)
    return _DEFAULT if _DEFAULT in adapters else next(iter(adapters), "")


def refuse_kind(
    unknown: Collection[str], file: str | PathLike[str], fix: str = "Save it with PEFT's save_pretrained"
) -> None:
    """Refuse tensors of other kinds of adapters, if there are any; `fix` says what to do instead.

    Raises:
        SourceError: There are.
    """
    if unknown:
        raise SourceError(
            "an adapter of a kind that is not exported",
            file=file,
            expected="LoRA or DoRA of PEFT",
            found=listing(unknown),
            fix=fix,
        )


def adapter_names(names: Collection[str], adapter: str, bias: str = "none") -> dict[str, str]:
    """Name the tensors of an adapter that stands in a state dict with its base model.

    With an embedding or a head that has LoRA, its weight is stored as well, as PEFT does.

    Args:
        names: All names.
        adapter: What it is called there.
        bias: Of which modules the base model's biases belong to it, in PEFT's words: none, lora_only, all.

    Returns:
        PEFT's name of every tensor, and the name that it has.
    """
    parsed = {name: _trained_tokens(name) or parse(name) for name in names}
    mine = {name: parts for name, parts in parsed.items() if parts.adapter == adapter}
    adapted = {parts.module for parts in mine.values() if parts.part}
    for name, parts in parsed.items():
        owner = parts.module.removesuffix(BASE)
        is_bias = parts.leaf == "bias" and (bias == "all" or (bias == "lora_only" and owner in adapted))
        is_of_base = not parts.part and not parts.adapter and ORIGINAL not in name
        if is_of_base and (is_bias or (parts.module != owner and owner in adapted and is_embedding(owner))):
            mine[name] = parts
    return {str(mine[name]): name for name in parsed if name in mine}


def is_embedding(module: str) -> bool:
    """Tell whether PEFT takes a module for an embedding or a head, by its name."""
    return module.rpartition(".")[2] in {"embed_tokens", "lm_head"}


def _trained_tokens(name: str) -> PeftName | None:
    match = _TOKENS.fullmatch(name.removeprefix(PREFIX))
    return PeftName(match["module"], "", match["adapter"], match["leaf"]) if match else None
