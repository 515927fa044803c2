"""Edits of a `config.json`: which keys must change, and changing these alone in the text of the file.

An edit is a path of keys and the value it gets; all functions here are pure and need nothing but JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = [
    "REMOVED",
    "Edits",
    "KeyPath",
    "added_rope_edits",
    "class_edits",
    "differences",
    "dtype_edits",
    "edit_json",
    "named_dtype",
    "parse_object",
    "rope_edits",
    "tie_edits",
    "untie_edits",
    "vocab_edits",
]

KeyPath = tuple[str, ...]
Edits = dict[KeyPath, object]

REMOVED: Final = object()
"""The value of a key that is to go."""

_MAX_DEPTH = 100
_DTYPE_KEYS = ("dtype", "torch_dtype")
# They have dtypes of their own, of what weights are packed into.
_QUANTIZATION = frozenset({"quantization_config", "compression_config"})

# What is not a property of the checkpoint, or is set by rules of its own.
# Marian has one of its own for the decoder, which resizing changes with the other.
_VOCAB_SIZE = re.compile(r"(decoder_)?vocab_size")
_NOT_COMPARED = frozenset(
    {
        "architectures",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "dtype",
        "experts_implementation",
        "gradient_checkpointing",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",  # training code turns it off to save memory; the file's value is the one for inference
    }
)

# Values that are replaced as a whole: their keys depend on each other.
_ATOMIC = frozenset({"quantization_config", "rope_parameters", "rope_scaling"})

# What transformers 4 calls the rope base of the full and of the sliding layers, and the rotary share, by model type.
_ROPE_NAMES = {
    "gpt_neox": ("rotary_emb_base", "rope_local_base_freq", "rotary_pct"),
    "gpt_neox_japanese": ("rotary_emb_base", "rope_local_base_freq", "rotary_pct"),
    "modernbert": ("global_rope_theta", "local_rope_theta", "partial_rotary_factor"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta", "partial_rotary_factor"),
}
_USUAL_ROPE_NAMES = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def parse_object(data: bytes) -> dict[str, Any]:
    """Read the JSON of a config.

    Raises:
        ValueError: It is none, or no object, or too deep to be one.
    """
    try:
        content = json.loads(data.decode())
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(type(content).__name__)
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        level = [inner for value in level for inner in _inner(value)]
        if not level:
            return content
    raise ValueError("values nested too deeply")


def _inner(value: object) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def class_edits(config: Mapping[str, Any], class_name: str | None) -> Edits:
    """Return the edits that name the model's class, without what `fully_shard` puts before or instead of it.

    Args:
        config: The parsed config.
        class_name: The class; None to keep the one that the config names.
    """
    edits: Edits = {}
    written, auto_map = config.get("architectures"), config.get("auto_map")
    named = [class_name] if class_name is not None else written if isinstance(written, list) else []
    named = [name.removeprefix("FSDP") if isinstance(name, str) else name for name in named]
    if named and named != written:
        edits["architectures",] = named
    if isinstance(auto_map, dict):
        kept = {key: value for key, value in auto_map.items() if "_fsdp_" not in str(value)}
        if kept != auto_map:
            edits["auto_map",] = kept or REMOVED
    return edits


def named_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config names, for the whole model or for its text part."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return next((str(part[key]) for part in parts for key in _DTYPE_KEYS if part.get(key)), None)


def dtype_edits(config: Mapping[str, Any], dtype: torch.dtype, *, everywhere: bool = False) -> Edits:
    """Return the edits that make the config's dtype that of the files, in whichever spelling it has.

    Parts of the model (`text_config`) follow where they had the dtype of the whole, or all of them. A config that says
    nothing means float32 to those who read no file, so it stays as it is for float32 files.
    """
    name = str(dtype).removeprefix("torch.")
    paths = {path: value for path, value in _leaves(config) if path[-1] in _DTYPE_KEYS and isinstance(value, str)}
    paths = {path: value for path, value in paths.items() if _QUANTIZATION.isdisjoint(path)}
    whole = {path: value for path, value in paths.items() if len(path) == 1} or paths
    if not whole:
        return {} if dtype is torch.float32 else {("torch_dtype",): name}
    old = set(paths.values() if everywhere else whole.values())
    return {path: name for path, value in paths.items() if value != name and value in old}


def tie_edits(config: Mapping[str, Any]) -> Edits:
    """Return the edits that say that embeddings are tied, against the flags and the defaults of the class."""
    return {path: True for path in _tie_flags(config) if _at(config, path) is not True}


def untie_edits(config: Mapping[str, Any]) -> Edits:
    """Return the edits that say that no weights are tied, against the flags and the defaults of the class."""
    inner = [path for path, value in _leaves(config) if path[-1] == "tie_word_embeddings" and value]
    return {path: False for path in (*_tie_flags(config), *inner) if _at(config, path) is not False}


def vocab_edits(config: Mapping[str, Any], old: int, new: int) -> Edits:
    """Return the edits that change the size of the vocabulary, where it stands or, for a class's default, is added."""
    paths = [path for path, value in _leaves(config) if _VOCAB_SIZE.fullmatch(path[-1]) and value == old]
    text_part = ("text_config",) if isinstance(config.get("text_config"), dict) else ()
    return dict.fromkeys(paths or [(*text_part, "vocab_size")], new)


def rope_edits(config: Mapping[str, Any]) -> Edits:
    """Return the edits that add, to every `rope_parameters`, the spelling that transformers 4 reads."""
    edits: Edits = {}
    for path, part in _parts(config):
        edits.update(
            {(*path, key): value for key, value in _legacy_rope(part).items() if part.get(key, REMOVED) != value}
        )
    return edits


def added_rope_edits(config: Mapping[str, Any]) -> Edits:
    """Return those of `rope_edits` that contradict nothing: without them transformers 4 takes its own default."""
    parts = dict(_parts(config))
    return {path: value for path, value in rope_edits(config).items() if path[-1] not in parts[path[:-1]]}


def differences(read: Mapping[str, Any], live: Mapping[str, Any], written: Mapping[str, Any]) -> Edits:
    """Return the edits that make a config file say what a live config says.

    Args:
        read: The file as its config class reads it, defaults and all, as JSON values.
        live: The live config, as JSON values.
        written: What the file says itself.
    """
    edits: Edits = {}
    for key in sorted(read.keys() | live.keys()):
        old, new = read.get(key, REMOVED), live.get(key, REMOVED)
        if old == new or key in _NOT_COMPARED or key.startswith("_"):
            continue
        inner = written.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(inner, dict) and key not in _ATOMIC:
            edits.update({(key, *path): value for path, value in differences(old, new, inner).items()})
        else:
            edits[key,] = new
    if ("rope_parameters",) in edits:
        edits.update({(key,): value for key, value in _legacy_rope(live).items()})
    return edits


def edit_json(text: str, edits: Mapping[KeyPath, object]) -> str:
    """Apply edits to the text of a JSON object; every other character stays, so order and indentation do.

    Args:
        text: A valid JSON object.
        edits: Path of keys to new value, or `REMOVED`. All keys of a path but the last must be there.
    """
    for path, value in edits.items():
        text = _edit(text, path, value)
    return text


def _legacy_rope(config: Mapping[str, Any]) -> dict[str, object]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    base, local_base, share = _ROPE_NAMES.get(str(config.get("model_type")), _USUAL_ROPE_NAMES)
    main, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    if not isinstance(main, dict) or "rope_theta" not in main:
        return {}
    scaling = {key: value for key, value in main.items() if key not in {"rope_theta", "partial_rotary_factor"}}
    legacy = {base: main["rope_theta"], "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}
    if "partial_rotary_factor" in main:
        legacy[share] = main["partial_rotary_factor"]
    if isinstance(local, dict) and "rope_theta" in local:
        legacy[local_base] = local["rope_theta"]
    return legacy


def _parts(config: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield a config and, under their paths, the configs of its parts."""
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict) and key not in _ATOMIC:
            yield from _parts(value, (*path, key))


def _tie_flags(config: Mapping[str, Any]) -> list[KeyPath]:
    has_text_part = isinstance(config.get("text_config"), dict)
    return [("tie_word_embeddings",), *([("text_config", "tie_word_embeddings")] if has_text_part else [])]


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    for path, part in _parts(config):
        yield from (((*path, key), value) for key, value in part.items() if not isinstance(value, dict))


def _at(config: Mapping[str, Any], path: KeyPath) -> object:
    value: Any = config
    for key in path:
        value = value.get(key)
    return value


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a member of an object stands in the text: the gap before its key, the key, the value, its end."""

    gap: int
    key: int
    value: int
    stop: int


def _edit(text: str, path: KeyPath, value: object) -> str:
    start = text.index("{")
    for key in path[:-1]:
        start = _members(text, start)[key].value
    members = _members(text, start)
    member = members.get(path[-1])
    if value is REMOVED:
        return text if member is None else _edit(_without(text, members, member), path, value)
    if member is not None:
        old = text[member.value : member.stop]
        is_inline = old[0] in "[{" and "\n" not in old
        return text[: member.value] + _dump(text, value, member.key, is_inline=is_inline) + text[member.stop :]
    if not members:
        return f"{text[: start + 1]}{json.dumps(path[-1])}: {_dump(text, value, start)}{text[start + 1 :]}"
    last = max(members.values(), key=lambda member: member.stop)
    new = f",{text[last.gap : last.key]}{json.dumps(path[-1])}: {_dump(text, value, last.key)}"
    return text[: last.stop] + new + text[last.stop :]


def _without(text: str, members: Mapping[str, _Member], member: _Member) -> str:
    after = [other.key for other in members.values() if other.key > member.key]
    if after:
        return text[: member.key] + text[min(after) :]
    before = [other.stop for other in members.values() if other.key < member.key]
    return text[: max(before, default=member.key)] + text[member.stop :]


def _members(text: str, start: int) -> dict[str, _Member]:
    """Find the members of the object that begins at `start`."""
    decoder = json.JSONDecoder()
    members = {}
    gap = start + 1
    key_start = _skip_space(text, gap)
    while text[key_start] != "}":
        key, stop = decoder.raw_decode(text, key_start)
        value_start = _skip_space(text, _skip_space(text, stop) + 1)
        _, stop = decoder.raw_decode(text, value_start)
        members[key] = _Member(gap, key_start, value_start, stop)
        gap = _skip_space(text, stop)
        if text[gap] == ",":
            gap += 1
        key_start = _skip_space(text, gap)
    return members


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in {" ", "\t", "\r", "\n"}:
        at += 1
    return at


def _dump(text: str, value: object, key_start: int, *, is_inline: bool = False) -> str:
    """Write a value as the text around it is indented."""
    ensure_ascii = text.isascii() or not _is_encodable(value)
    if is_inline:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    line_start = text.rfind("\n", 0, key_start) + 1
    outer = text[line_start : _skip_space(text, line_start)]
    first = text.find("\n") + 1
    unit = text[first : _skip_space(text, first)].rpartition("\n")[2] if first else None
    dumped = json.dumps(value, indent=unit or None, ensure_ascii=ensure_ascii)
    return dumped.replace("\n", f"\n{outer}")


def _is_encodable(value: object) -> bool:
    """Tell whether a value has no halves of characters, which JSON can spell and files cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
