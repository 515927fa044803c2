"""Pickles that are well-formed or nearly so and say something else: opcode by opcode, and functions that run."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from random import Random

from fuzz.case import NUMBERS, Case, Mutator

__all__ = ["CANARY", "MUTATORS"]

CANARY = "fuzz_canary"
"""A module that must never be imported."""

MUTATORS: list[Mutator] = []

_FOREIGN = """os system, posix system, builtins eval, builtins exec, builtins getattr, builtins __import__,
    pickle loads, subprocess Popen, fuzz_canary run, torch load, torch.hub load, pathlib Path.unlink,
    torch._utils _rebuild_sparse_tensor, operator attrgetter, functools partial, numpy.core.multiarray scalar,
    fsdp_export.sources.unpickle Call, torch.storage _load_from_bytes,
    torch Tensor.__reduce__, a\x1b[2Jb c\u202ed"""
_STRANGE = (b"", b"\xff", b"\xed\xa0\x80", b"/etc/passwd", b"a\nb", b"a\0b", b"." * 50, b"x" * 100_000)
_COMMAND = f"touch {CANARY}"
_OPCODES = [code.code.encode("latin-1") for code in pickletools.opcodes]
_ARGUMENTS = (b"", b"\0", b"\1", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1a", b"os\nsystem\n", b"1\n", bytes(8))


def _mutator(function: Mutator) -> Mutator:
    MUTATORS.append(function)
    return function


def _opcodes(data: bytes) -> list[bytes]:
    """Split a pickle into its opcodes with their arguments; what is behind the last whole one stays together."""
    starts: list[int] = []
    with suppress(ValueError, IndexError, KeyError):
        starts.extend(position for _, _, position in pickletools.genops(data) if position is not None)
    return [data[begin:end] for begin, end in zip(starts, [*starts[1:], len(data)], strict=True)]


def _is_archive(_: str, data: bytes) -> bool:
    return data.startswith(b"PK\x03\x04")


def _is_metadata(name: str, data: bytes) -> bool:
    return name.endswith(".metadata") and data.startswith(b"\x80")


def _pick(case: Case) -> tuple[str, bytes, bytes] | None:
    """Choose a file that is, or has, a pickle; return its name, its content and the pickle."""
    picked = case.pick_file(lambda name, data: _is_metadata(name, data) or _is_archive(name, data))
    if picked is None:
        return None
    name, data = picked
    if not _is_archive(name, data):
        return name, data, data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = next((member for member in archive.namelist() if member.endswith("data.pkl")), None)
        return (name, data, archive.read(member)) if member is not None else None


def _put_back(case: Case, name: str, data: bytes, new: bytes) -> None:
    """Put a pickle into the place of the old one, with its checksum if it is in an archive.

    Of a file with several archives it is the last one whose directory is found, and metadata that are as they were
    are told its new length.
    """
    if not _is_archive(name, data):
        case.write(name, new)
        return
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as archive:
        first = min(member.header_offset for member in old.infolist())
        for member in old.infolist():
            content = new if member.filename.endswith("data.pkl") else old.read(member)
            archive.writestr(zipfile.ZipInfo(member.filename), content)
    case.write(name, data[:first] + stream.getvalue())
    if name.endswith(".distcp"):
        _fit_metadata(case, name, first, len(stream.getvalue()))


def _fit_metadata(case: Case, name: str, offset: int, length: int) -> None:
    folder = Path(name).parent
    for other, content in case.seed.files.items():
        file = case.folder / other
        is_near = other.endswith(".metadata") and Path(other).parent == folder and file.is_file()
        if is_near and file.stat().st_size == len(content) and file.read_bytes() == content:
            metadata = pickle.loads(content)
            for place in metadata.storage_data.values():
                if (place.relative_path, place.offset) == (Path(name).name, offset):
                    place.length = length
            file.write_bytes(pickle.dumps(metadata))


def _replaced(draw: Random, opcode: bytes) -> bytes:
    """Return an opcode with another argument."""
    code, argument = opcode[:1], opcode[1:]
    number = draw.choice((*NUMBERS, -1))
    if code in {pickle.BININT, pickle.BININT1, pickle.BININT2}:
        return draw.choice(
            (b"J" + struct.pack("<i", draw.choice((-1, 0, 1, 2, 3, 2**31 - 1))), pickle.dumps(number, 2)[2:-1])
        )
    if code in {pickle.BINUNICODE, pickle.SHORT_BINUNICODE}:
        text = argument[4:] if code == pickle.BINUNICODE else argument[1:]
        near = (text + b"0", text[:-1], text.replace(b"0", b"1"), b"../" + text, text * 100)
        new = draw.choice((*near, *_STRANGE))
        return pickle.BINUNICODE + struct.pack("<I", len(new)) + new
    if code in {pickle.BINGET, pickle.LONG_BINGET}:
        return pickle.LONG_BINGET + struct.pack("<I", draw.randrange(40))
    return draw.choice((pickle.NONE, pickle.NEWTRUE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, b"K\0"))


def _bomb(draw: Random) -> bytes:
    """Return opcodes for a value that is small here and endless, or too deep, to whoever walks through it."""
    depth = draw.choice((10, 60, 3000))
    keys = [struct.pack("<I", 9000 + index) for index in range(depth)]
    pairs_of_pairs = b")" + b"".join(b"r" + key + b"j" + key + b"\x86" for key in keys)
    lists_of_lists = b"]" + b"".join(b"r" + key + b"]j" + key + b"aj" + key + b"a" for key in keys)
    itself = b"]r" + keys[0] + b"j" + keys[0] + b"a"
    mapping_of_itself = b"}r" + keys[0] + b"K\0j" + keys[0] + b"s"
    return draw.choice((pairs_of_pairs, lists_of_lists, itself, mapping_of_itself, b")" + b"\x85" * depth))


@_mutator
def change_opcodes(case: Case) -> str | None:
    if (picked := _pick(case)) is None:
        return None
    name, data, old = picked
    opcodes, done = _opcodes(old), []
    for _ in range(case.draw.choice((1, 1, 1, 2, 5))):
        if not opcodes:
            return None
        at, change = case.draw.randrange(len(opcodes)), case.draw.choice(_CHANGES)
        done.append(f"{change.__name__.strip('_')} {at} {opcodes[at][:20]!r}")
        change(case.draw, opcodes, at)
    _put_back(case, name, data, b"".join(opcodes))
    return f"{name}: {', '.join(done)}"


def _drop(_: Random, opcodes: list[bytes], at: int) -> None:
    del opcodes[at]


def _double(_: Random, opcodes: list[bytes], at: int) -> None:
    opcodes.insert(at, opcodes[at])


def _swap(draw: Random, opcodes: list[bytes], at: int) -> None:
    other = draw.randrange(len(opcodes))
    opcodes[at], opcodes[other] = opcodes[other], opcodes[at]


def _insert(draw: Random, opcodes: list[bytes], at: int) -> None:
    opcodes.insert(at, draw.choice(_OPCODES) + draw.choice(_ARGUMENTS))


def _change_argument(draw: Random, opcodes: list[bytes], at: int) -> None:
    opcodes[at] = _replaced(draw, opcodes[at])


def _put_bomb(draw: Random, opcodes: list[bytes], at: int) -> None:
    opcodes[at] = _bomb(draw)


def _move(draw: Random, opcodes: list[bytes], at: int) -> None:
    opcodes.insert(draw.randrange(len(opcodes)), opcodes.pop(at))


_CHANGES = (_drop, _double, _swap, _insert, _change_argument, _change_argument, _change_argument, _put_bomb, _move)


@_mutator
def exchange_values(case: Case) -> str | None:
    """Exchange two values of a kind: names, shapes, offsets, dtypes."""
    if (picked := _pick(case)) is None:
        return None
    name, data, old = picked
    opcodes = _opcodes(old)
    code = case.draw.choice((b"X", b"\x8c", b"K", b"M", b"c", b"h", b"\x85", b"\x86"))
    same = [index for index, opcode in enumerate(opcodes) if opcode[:1] == code]
    if len(same) < 2:
        return None
    one, other = case.draw.sample(same, 2)
    opcodes[one], opcodes[other] = opcodes[other], opcodes[one]
    _put_back(case, name, data, b"".join(opcodes))
    return f"{name}: {opcodes[other][:30]!r} and {opcodes[one][:30]!r}"


@_mutator
def name_code(case: Case) -> str | None:
    """Let a pickle run something as soon as it is read."""
    if (picked := _pick(case)) is None:
        return None
    name, data, old = picked
    module, _, function = case.draw.choice(_FOREIGN.split(",")).strip().partition(" ")
    argument = b"X" + struct.pack("<I", len(_COMMAND)) + _COMMAND.encode() + b"\x85"
    call = argument + case.draw.choice((b"R", b"\x81", b"b", b"i"))
    begin = old[:2]
    if case.draw.random() < 0.5:
        begin += f"c{module}\n{function}\n".encode() + call
    else:
        begin += b"".join(b"X" + struct.pack("<I", len(text.encode())) + text.encode() for text in (module, function))
        begin += b"\x93" + call
    _put_back(case, name, data, begin + old[2:])
    # Of a data file with many chunks not every one is read for certain.
    is_metadata = name.endswith(".metadata") and "step-400" not in name
    case.names_code = is_metadata or case.seed.library in {"ranks", "torch", ""}
    return f"{name}: {module}.{function}"
