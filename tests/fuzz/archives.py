"""Archives of torch.save that are sound zips, or nearly so, with other members than torch writes."""

from __future__ import annotations

import io
import struct
import zipfile
from random import Random

from fuzz.case import NUMBERS, Case, Mutator

__all__ = ["MUTATORS"]

MUTATORS: list[Mutator] = []

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
# Offset and width of the numbers in the records of a zip.
_FIELDS = {
    _LOCAL: ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    _CENTRAL: ((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
    _END: ((4, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}
_Member = tuple[str, bytes, int]


def _mutator(function: Mutator) -> Mutator:
    MUTATORS.append(function)
    return function


def _is_archive(_: str, data: bytes) -> bool:
    return data.startswith(_LOCAL) and zipfile.is_zipfile(io.BytesIO(data))


@_mutator
def change_field(case: Case) -> str | None:
    """Change a number in a record of the directory, or of the members."""
    if not (picked := case.pick_file(_is_archive)):
        return None
    name, data = picked[0], bytearray(picked[1])
    signature = case.draw.choice(list(_FIELDS))
    places = [at for at in range(len(data) - 50) if data.startswith(signature, at)]
    places = places or [at for at in range(len(data) - 21) if data.startswith(signature, at)]
    if not places:
        return None
    at = case.draw.choice(places)
    field, width = case.draw.choice(_FIELDS[signature])
    old = int.from_bytes(data[at + field : at + field + width], "little")
    others = [int.from_bytes(data[other + field : other + field + width], "little") for other in places]
    new = case.draw.choice((old + 1, old - 1, case.draw.choice(NUMBERS), case.draw.choice(others), len(data))) % (
        1 << 8 * width
    )
    data[at + field : at + field + width] = new.to_bytes(width, "little")
    case.write(name, data)
    return f"{name} {signature!r} at {at}, field {field}: {old} to {new}"


@_mutator
def change_members(case: Case) -> str | None:
    """Write an archive anew with members missing, doubled, called otherwise, exchanged, compressed or too many."""
    if not (picked := case.pick_file(_is_archive)):
        return None
    name, data = picked
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        first = min(member.header_offset for member in old.infolist())
        members = [(member.filename, old.read(member), zipfile.ZIP_STORED) for member in old.infolist()]
    at, change = case.draw.randrange(len(members)), case.draw.choice(_CHANGES)
    what = members[at][0]
    change(case.draw, members, at)
    comment = case.draw.choice((*[b""] * 7, b"x", _END * 5000, data[:60_000]))
    case.write(name, data[:first] + _archive(members, comment))
    return f"{name}: {change.__name__.strip('_')} {what[:60]}, comment of {len(comment)} bytes"


def _drop(_: Random, members: list[_Member], at: int) -> None:
    del members[at]


def _double(draw: Random, members: list[_Member], at: int) -> None:
    name, content, _ = members[at]
    members.append((name, draw.choice((content, content[::-1], b"")), zipfile.ZIP_STORED))


def _rename(draw: Random, members: list[_Member], at: int) -> None:
    name, content, _ = members[at]
    other = draw.choice(members)[0]
    new = draw.choice((other, name + "0", name + "/", name[1:], "../" + name, name.upper(), "é\0x", "x" * 60_000))
    members[at] = (new, content, zipfile.ZIP_STORED)


def _change_content(draw: Random, members: list[_Member], at: int) -> None:
    name, content, _ = members[at]
    new = draw.choice((b"", content[:-1], content + content, bytes(len(content)), b"big"))
    members[at] = (name, new, zipfile.ZIP_STORED)


def _exchange(draw: Random, members: list[_Member], at: int) -> None:
    other = draw.randrange(len(members))
    (name, content, _), (other_name, other_content, _) = members[at], members[other]
    members[at], members[other] = (name, other_content, 0), (other_name, content, 0)


def _compress(draw: Random, members: list[_Member], at: int) -> None:
    name, content, _ = members[at]
    members[at] = (name, draw.choice((content, bytes(20 << 20))), draw.choice((8, 12, 14)))


def _add_many(_: Random, members: list[_Member], at: int) -> None:
    members += [(f"{members[at][0]}{index}", b"", zipfile.ZIP_STORED) for index in range(20_000)]


def _shuffle(draw: Random, members: list[_Member], _: int) -> None:
    draw.shuffle(members)


_CHANGES = (_drop, _double, _rename, _change_content, _exchange, _compress, _add_many, _shuffle)


def _archive(members: list[_Member], comment: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content, compression in members:
            archive.NameToInfo.pop(name, None)  # it would warn of names that stand twice
            archive.writestr(zipfile.ZipInfo(name), content, compression)
        archive.comment = comment[:65_535]
    return stream.getvalue()


@_mutator
def claim_sizes(case: Case) -> str | None:
    """Make the end of a directory claim more, or much more, than there is, in the form for large archives too."""
    if not (picked := case.pick_file(_is_archive)):
        return None
    name, data = picked
    at = data.rfind(_END)
    if at < 0:
        return None
    count, size, offset = (case.draw.choice(NUMBERS) for _ in range(3))
    end = struct.pack(
        "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count % 2**64, count % 2**64, size % 2**64, offset % 2**64
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, case.draw.choice((at, 0, 2**63, 2**64 - 1)), 1)
    short = struct.pack("<4s4H2LH", _END, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    case.write(name, data[:at] + end + locator + short)
    return f"{name}: {count} members, {size} bytes at {offset}"
