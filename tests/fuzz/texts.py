"""JSON that is well-formed or nearly so and says something else: numbers, names, shapes, keys, depth."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

from fuzz.case import NUMBERS, Case, Mutator

__all__ = ["MUTATORS"]

MUTATORS: list[Mutator] = []

_SHARDING = "DCP_SHARDING_INFO"


class _Pairs(list[Any]):
    """An object of JSON, in which a key may stand twice."""


class _Raw(str):
    """Text that is written as it is."""

    __slots__ = ()


def _mutator(function: Mutator) -> Mutator:
    MUTATORS.append(function)
    return function


def _load(text: str | bytes) -> Any:
    return json.loads(text, object_pairs_hook=_Pairs)


def _dump(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, _Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_dump(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    return json.dumps(value)


_TEXTS = ("", "\0", "a\nb", "\ud800", "../x", "/etc/passwd", "__metadata__", "x" * 10_000, "FSDP\udfff", "é")
_WORDS = ("F32", "I64", "F8_E8M0", "F4", "C64", "F6_E2M3", "bfloat16", "torch.float32", "llama", "LlamaForCausalLM")
_RAW = tuple(map(_Raw, ("1e5", "1e999", "NaN", "-Infinity", "1.5", "-0.0", "-1", str(-(2**63)), "9" * 5000)))
_OTHERS = (
    *map(
        _Raw, ("null", "true", "[]", "{}", "[[]]", "[null]", '["FSDP\\ud800"]', '{"a":1,"a":2}', "[0" + ",0" * 70 + "]")
    ),
)


def _strange(draw: Random, old: Any) -> Any:
    """Return a value that does not belong in the place of another."""
    depth = draw.choice((10, 900, 5000, 100_000))
    deep = (_Raw("[" * depth + "]" * depth), _Raw('{"a":' * depth + "1" + "}" * depth), _Raw("[" * depth))
    near: list[Any] = []
    if isinstance(old, int):
        near = [old + 1, old - 1, old * 2, float(old), str(old), [old]]
    elif isinstance(old, str):
        near = [old + "0", old[:-1], old.upper(), old.replace("0", "1"), [old], old * 50]
    elif isinstance(old, list):
        near = [old[::-1], [*old, 1], old[1:], [*old, *old], type(old)(old[:-1])]
    return draw.choice(draw.choice([NUMBERS, _TEXTS, _WORDS, _RAW, _OTHERS, deep, near or _OTHERS, near or NUMBERS]))


def _change(draw: Random, content: Any) -> tuple[Any, str]:
    """Change one place of a value, at any depth."""
    places: list[tuple[Any, int]] = []
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            places += [(value, index) for index in range(len(value))]
            waiting += [inner[1] if isinstance(value, _Pairs) else inner for inner in value]
    if not places or draw.random() < 0.02:
        new = _strange(draw, content)
        return new, f"all to {_dump(new)[:40]}"
    target, index = draw.choice(places)
    key, old = target[index] if isinstance(target, _Pairs) else (None, target[index])
    kind = draw.choice(("value", "value", "value", "value", "drop", "double", "key", "exchange", "sharding"))
    if kind == "drop":
        del target[index]
    elif kind == "double":
        target.insert(index, target[index])
    elif kind == "key" and key is not None:
        new = draw.choice(
            (
                key + "0",
                key[:-1],
                "",
                "\ud800",
                "a\0b",
                "a\nb",
                "__metadata__",
                "shape",
                "x" * 70_000,
                "_orig_mod." + key,
            )
        )
        target[index] = (new, old)
    elif kind == "exchange":
        other, at = draw.choice(places)
        mine = old
        theirs = other[at][1] if isinstance(other, _Pairs) else other[at]
        _set(target, index, theirs)
        _set(other, at, mine if not _holds(mine, other) else 0)
        if _holds(theirs, target):
            _set(target, index, 0)
    elif key == _SHARDING:
        inner, what = _change(draw, _load(old))
        target[index] = (key, _dump(inner))
        return content, f"{key}: {what}"
    else:
        _set(target, index, _strange(draw, old))
    return content, f"{kind} of {(key or index)!r:.60}, was {_dump(old)[:60]}, is {_dump(content)[:80]}"


def _set(target: Any, index: int, value: Any) -> None:
    target[index] = (target[index][0], value) if isinstance(target, _Pairs) else value


def _holds(value: Any, inner: Any) -> bool:
    """Tell whether a value has another one in it, which must not be put into that one."""
    if value is inner:
        return True
    items = [pair[1] for pair in value] if isinstance(value, _Pairs) else value if isinstance(value, list) else ()
    return any(_holds(item, inner) for item in items)


def _is_json(name: str, data: bytes) -> bool:
    if not name.endswith(".json"):
        return False
    try:
        _load(data)
    except (ValueError, RecursionError):
        return False
    return True


def _header_at(data: bytes) -> int | None:
    """Return where a file of safetensors begins; in a data file of DCP it may be anywhere."""
    at = data.find(b'{"')
    while at >= 8:
        length = struct.unpack("<Q", data[at - 8 : at])[0]
        if length <= len(data) - at:
            return at - 8
        at = data.find(b'{"', at + 1)
    return None


@_mutator
def change_json(case: Case) -> str | None:
    if not (picked := case.pick_file(_is_json)):
        return None
    name, data = picked
    content, what = _load(data), ""
    for _ in range(case.draw.choice((1, 1, 1, 3))):
        content, note = _change(case.draw, content)
        what += f" {note}"
        if isinstance(content, _Raw):
            break
    case.write(name, _dump(content).encode("utf-8", "surrogatepass"))
    return f"{name}:{what}"


@_mutator
def change_header(case: Case) -> str | None:
    """Change the JSON in a file of safetensors; its length is made to fit, mostly."""
    if not (
        picked := case.pick_file(
            lambda name, data: name.endswith((".safetensors", ".distcp")) and _header_at(data) is not None
        )
    ):
        return None
    name, data = picked
    begin = _header_at(data)
    assert begin is not None
    length = struct.unpack("<Q", data[begin : begin + 8])[0]
    try:
        content = _load(data[begin + 8 : begin + 8 + length])
    except ValueError:
        return None
    content, what = _change(case.draw, content)
    text = _dump(content).encode("utf-8", "surrogatepass")
    text += b" " * case.draw.choice((-len(text) % 8, 0, 1))
    new_length = case.draw.choice((*[len(text)] * 9, len(text) + 1, length))
    case.write(name, data[:begin] + struct.pack("<Q", new_length) + text + data[begin + 8 + length :])
    return f"{name}: {what}"
