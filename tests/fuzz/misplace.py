"""Files that are missing, called otherwise, exchanged, or something else than files."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from fuzz.case import Case, Mutator

from fsdp_export.paths import is_folder

__all__ = ["MUTATORS"]

MUTATORS: list[Mutator] = []

_MAX_NAME_BYTES = 255
_NAMES = ("a\nb", "x" * 255, "\udcff\udcfe", "é", " ", "-rf", "~", "a'b\"c", "\x1b[31m", "CON", "..data", "%s", "{0}")


def _mutator(function: Mutator) -> Mutator:
    MUTATORS.append(function)
    return function


def _pick(case: Case) -> str | None:
    names = case.paths()
    return case.draw.choice(names) if names else None


@_mutator
def remove(case: Case) -> str | None:
    if (name := _pick(case)) is None:
        return None
    (case.folder / name).unlink()
    return name


@_mutator
def rename(case: Case) -> str | None:
    """Change a number or a part of a name, or all of it."""
    if (name := _pick(case)) is None:
        return None
    folder, base = os.path.split(name)
    numbers = list(re.finditer(r"\d+", base))
    new = case.draw.choice((*_NAMES, base + ".bak", base[1:] or "x", base.upper()))
    if numbers and case.draw.random() < 0.7:
        number = case.draw.choice(numbers)
        digits = case.draw.choice((str(int(number[0]) + 1), "9" * len(number[0]), "999999", "0", "²", "-1", "00000"))
        new = base[: number.start()] + digits + base[number.end() :]
    target = case.folder / folder / new
    if is_folder(target) or new in {".", ".."} or len(os.fsencode(new)) > _MAX_NAME_BYTES:
        return None
    (case.folder / name).rename(target)
    return f"{name} to {new!r}"


@_mutator
def copy_as(case: Case) -> str | None:
    """Put a file beside the others once more, under a name of another kind of checkpoint."""
    if not (picked := case.pick_file()):
        return None
    name, data = picked
    foreign, other = case.foreign_file()
    new = str(Path(name).with_name(Path(foreign).name))
    if (case.folder / new).exists():
        return None
    case.write(new, case.draw.choice((data, other, b"")))
    case.is_of_two = True
    return f"{name} or {foreign} as {new}"


@_mutator
def exchange(case: Case) -> str | None:
    one, other = case.pick_file(), case.pick_file()
    if not one or not other or one[0] == other[0]:
        return None
    case.write(one[0], other[1])
    case.write(other[0], one[1])
    return f"{one[0]} and {other[0]}"


@_mutator
def replace_by_foreign(case: Case) -> str | None:
    """Put the content of another file, of this or any other checkpoint, into a file."""
    if not (picked := case.pick_file()):
        return None
    name = picked[0]
    same_kind = [
        (f"{seed.name}/{other}", data)
        for seed in case.seeds
        for other, data in seed.files.items()
        if Path(other).name == Path(name).name and data != picked[1]
    ]
    foreign, data = case.draw.choice(same_kind) if same_kind and case.draw.random() < 0.6 else case.foreign_file()
    case.write(name, data)
    return f"{name} by {foreign}"


@_mutator
def replace_by_something(case: Case) -> str | None:
    """Put in a file's place what is no file, or a very strange one."""
    if (name := _pick(case)) is None:
        return None
    path = case.folder / name
    is_small = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
    content = path.read_bytes() if is_small else b""
    path.unlink()
    kind = case.draw.choice(list(_THINGS))
    _THINGS[kind](path, content)
    if kind in {"sparse", "hole"}:
        os.truncate(path, case.draw.choice((1 << 20, 1 << 33, 1 << 42)))
    return f"{name} by {kind}"


def _make_socket(path: Path, _: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(str(path))
        except OSError:  # the path is too long for one
            path.touch()


def _link_away(path: Path, content: bytes) -> None:
    hidden = path.with_name(f".{path.name[:100]}-hidden")
    hidden.write_bytes(content)
    path.symlink_to(hidden)


_THINGS: dict[str, Callable[[Path, bytes], object]] = {
    "folder": lambda path, _: path.mkdir(),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": _make_socket,
    "nothing": lambda path, _: path.symlink_to("/dev/null"),
    "zeros": lambda path, _: path.symlink_to("/dev/zero"),
    "loop": lambda path, _: path.symlink_to(path.name),
    "dangling link": lambda path, _: path.symlink_to("x" * 200),
    "link to its folder": lambda path, _: path.symlink_to("."),
    "link": _link_away,
    "empty": lambda path, _: path.write_bytes(b""),
    "hole": lambda path, _: path.write_bytes(b""),
    "sparse": lambda path, content: path.write_bytes(content),
}


@_mutator
def forbid(case: Case) -> str | None:
    """Take the right to read a file, or to look into its folder or list it."""
    if (name := _pick(case)) is None:
        return None
    path = case.folder / name
    if path.is_symlink():
        return None
    path = case.draw.choice((path, path.parent))
    mode = case.draw.choice((0, 0o444, 0o111)) if path.is_dir() else 0
    path.chmod(mode)
    case.is_unprivileged = True
    return f"{path.relative_to(case.folder)} {mode:o}"


@_mutator
def remove_folder(case: Case) -> str | None:
    folders = sorted({str(Path(name).parent) for name in case.paths()} - {"."})
    if not folders:
        return None
    folder = case.draw.choice(folders)
    shutil.rmtree(case.folder / folder)
    return folder


@_mutator
def link_folders(case: Case) -> str | None:
    """Put a link to a folder above, or to itself, where readers look for folders."""
    name = case.draw.choice(
        ("step-900", "LATEST", "huggingface", "sharded", "consolidated", "additional_chat_templates")
    )
    path = case.folder / case.seed.source / name
    if os.path.lexists(path) or not path.parent.is_dir():
        return None
    target = case.draw.choice((".", name, "..") if case.seed.source else (".", name))
    path.symlink_to(target)
    return f"{name} to {target}"


@_mutator
def write_step(case: Case) -> str | None:
    """Write down another latest step."""
    name = case.draw.choice(("LATEST", "latest", "latest_checkpointed_iteration.txt"))
    path = case.folder / case.seed.source / name
    if os.path.lexists(path) or not path.parent.is_dir():
        return None
    text = case.draw.choice(
        (b"", b"20", b"9" * 5000, b"\xff\xfe", b"\0", b"../..", b"/", b"x" * 9000, "²".encode(), b"-1")
    )
    path.write_bytes(text)
    return f"{name} with {text[:20]!r}"
