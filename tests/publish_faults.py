"""Lets a test act before every change that this process makes to files: die, fail, or run another process's part."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Act = Callable[[int, str, tuple[Any, ...]], None]
Tree = dict[str, bytes | None]

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
_act: list[Act] = []


class Died(BaseException):
    """The process died here."""


def _is_change(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        return isinstance(args[0], (str, os.PathLike)) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in _CHANGES


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _act and _is_change(event, args):
        _act[-1](0, event, args)


sys.addaudithook(_audit)


@contextmanager
def before_each_change(act: Act) -> Iterator[None]:
    """Call `act(number, event, arguments)` before each change of a file or folder; what it raises prevents it."""
    number = -1

    def count(_: int, event: str, args: tuple[Any, ...]) -> None:
        nonlocal number
        number += 1
        suspended = _act[:]
        _act.clear()
        try:
            act(number, event, args)
        finally:
            _act.extend(suspended)

    _act.append(count)
    try:
        yield
    finally:
        _act.remove(count)


def dies_at(number: int, function: Callable[[], object], folder: Path, *, lives: bool = False) -> bool:
    """Run a function whose process dies before its change of this number; tell whether it got that far.

    With `lives` it only stops there: its locks stay.
    """

    def act(current: int, event: str, args: tuple[Any, ...]) -> None:
        if current >= number:
            raise Died

    try:
        with before_each_change(act):
            function()
    except Died:
        if not lives:
            close_locks(folder)
        return True
    return False


def close_locks(folder: Path) -> None:
    """Close the lock files below a folder, as the end of a process does."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).startswith(f"{folder}/.fsdp-export-"):
            os.close(int(link.name))


def tree(folder: Path) -> Tree:
    """Return every file below a folder with its bytes, and every folder with None."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def restore(folder: Path, state: Tree) -> None:
    """Make a folder hold what `tree` returned."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
