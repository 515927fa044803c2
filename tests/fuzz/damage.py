"""Damage to the bytes of a file, whatever they mean: what disks, copies and editors do."""

from __future__ import annotations

import re
from random import Random

from fuzz.case import NUMBERS, Case, Mutator

__all__ = ["MUTATORS"]

MUTATORS: list[Mutator] = []

_TAIL = 1500  # where the directory of an archive is


def _mutator(function: Mutator) -> Mutator:
    MUTATORS.append(function)
    return function


def _position(draw: Random, size: int) -> int:
    """Choose a byte: often one of a header, a directory at the end, or anything."""
    where = draw.random()
    if where < 0.25:
        return draw.randrange(min(size, 64))
    if where < 0.55:
        return draw.randrange(max(size - _TAIL, 0), size)
    return draw.randrange(size)


def _range(draw: Random, size: int) -> tuple[int, int]:
    begin = _position(draw, size)
    return begin, min(begin + draw.choice((1, 2, 4, 8, 16, 64, 300, 4096)), size)


@_mutator
def flip_bits(case: Case) -> str | None:
    if not (picked := case.pick_file(lambda _, data: data)):
        return None
    name, data = picked[0], bytearray(picked[1])
    at = [_position(case.draw, len(data)) for _ in range(case.draw.choice((1, 1, 1, 2, 8)))]
    for position in at:
        data[position] ^= 1 << case.draw.randrange(8)
    case.write(name, data)
    return f"{name} at {at}"


@_mutator
def set_byte(case: Case) -> str | None:
    if not (picked := case.pick_file(lambda _, data: data)):
        return None
    name, data = picked[0], bytearray(picked[1])
    at, value = _position(case.draw, len(data)), case.draw.choice((0, 1, 0x7F, 0x80, 0xFF, case.draw.randrange(256)))
    data[at] = value
    case.write(name, data)
    return f"{name} at {at} to {value:#x}"


@_mutator
def change_integer(case: Case) -> str | None:
    if not (picked := case.pick_file(lambda _, data: len(data) > 8)):
        return None
    name, data = picked[0], bytearray(picked[1])
    width, at = case.draw.choice((1, 2, 4, 8)), _position(case.draw, len(data) - 8)
    old = int.from_bytes(data[at : at + width], "little")
    new = case.draw.choice((*NUMBERS, old + 1, old - 1, old * 2, len(data), -1)) % (1 << 8 * width)
    data[at : at + width] = new.to_bytes(width, "little")
    case.write(name, data)
    return f"{name} at {at}, {width} bytes: {old} to {new}"


@_mutator
def truncate(case: Case) -> str | None:
    if not (picked := case.pick_file(lambda _, data: data)):
        return None
    name, data = picked
    end = case.draw.choice((case.draw.randrange(len(data)), len(data) - 1, len(data) // 2, min(9, len(data) - 1)))
    case.write(name, data[:end])
    return f"{name} to {end} of {len(data)}"


@_mutator
def extend(case: Case) -> str | None:
    if not (picked := case.pick_file()):
        return None
    name, data = picked
    size = case.draw.choice((1, 8, 100, 70_000))
    more = case.draw.choice((bytes(size), case.draw.randbytes(size), data[:size], data, case.foreign_file()[1]))
    front = case.draw.random() < 0.3
    case.write(name, more + data if front else data + more)
    return f"{name} by {len(more)} bytes at the {'front' if front else 'end'}"


@_mutator
def overwrite_range(case: Case) -> str | None:
    if not (picked := case.pick_file(lambda _, data: data)):
        return None
    name, data = picked
    begin, end = _range(case.draw, len(data))
    size = end - begin
    foreign, other = case.foreign_file()
    kind, new = case.draw.choice(
        (("zeros", bytes(size)), ("noise", case.draw.randbytes(size)), (foreign, other[:size]))
    )
    case.write(name, data[:begin] + new.ljust(size, b"\0") + data[end:])
    return f"{name} from {begin} to {end} by {kind}"


@_mutator
def move_range(case: Case) -> str | None:
    if not (picked := case.pick_file(lambda _, data: data)):
        return None
    name, data = picked
    begin, end = _range(case.draw, len(data))
    at = _position(case.draw, len(data))
    kind = case.draw.choice(("cut out", "doubled", "inserted at", "copied over", "swapped with"))
    piece, size = data[begin:end], end - begin
    other = data[at : at + size]
    changed = {
        "cut out": data[:begin] + data[end:],
        "doubled": data[:end] + data[begin:],
        "inserted at": data[:at] + piece + data[at:],
        "copied over": data[:at] + piece + data[at + size :],
        "swapped with": data[:begin] + other + data[end:at] + piece + data[at + size :] if end <= at else data[::-1],
    }[kind]
    case.write(name, changed)
    return f"{name} from {begin} to {end} {kind} {at}"


@_mutator
def change_digits(case: Case) -> str | None:
    """Change a number, or another word, that stands in a file as text: names, offsets, shapes."""
    pattern = case.draw.choice((rb"\d+", rb"[A-Za-z_]{3,}", rb"[\w./]{4,}"))
    if not (picked := case.pick_file(lambda _, data: re.search(pattern, data))):
        return None
    name, data = picked
    words = list(re.finditer(pattern, data))
    word = case.draw.choice(words)
    digits = bytes(case.draw.choice(b"0123456789") for _ in word[0])
    new = case.draw.choice((digits, case.draw.choice(words)[0], word[0][:-1], word[0] + b"0", b"../" + word[0], b"-1"))
    case.write(name, data[: word.start()] + new + data[word.end() :])
    return f"{name} at {word.start()}: {word[0][:60]!r} to {new[:60]!r}"
