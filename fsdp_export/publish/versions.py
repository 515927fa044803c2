"""A new folder for every version of a checkpoint, and a link to the newest one: what a reader opened never changes.

    weights/
        000007/                   complete, and never touched again until it is removed
        000008/
        latest -> 000008          replaced in one step, when 000008 is complete
        .fsdp-export-writing/     the version being written, and old ones being removed

A reader resolves the link once, and reads from the folder that it then knows. Versions are renamed into place when they
are complete, and renamed away before anything in them is removed: one that can be seen is whole, wherever the process
at work died. The next one removes what it finds in the inner folder, which is locked as that of a publication is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import SinkError, UsageError
from ..paths import read_file
from .file_system import is_real_folder, make_folder, sink_errors, sync
from .inner_folder import PREFIX, WRITING, InnerFolder

__all__ = ["LATEST", "NewVersion", "versions_in"]

LATEST = "latest"
"""Name of the link."""

_NUMBER = PREFIX + "version"
"""Name of a file in each version, which says the how manieth it is: no other folder is ever removed."""


@dataclass
class NewVersion:
    """A version from `begin` to `publish` and `remove_old`, or `abort`. One process makes it. Not collective.

    Attributes:
        root: The folder of all versions.
        name: The folder of this one in there.
        staging: Where to write it.
    """

    root: Path
    name: str
    staging: Path
    _number: int
    _inner: InnerFolder
    _fsync: bool
    _unsynced: list[Path]

    @classmethod
    def begin(cls, root: Path, name: str | None, *, fsync: bool) -> NewVersion:
        """Make the folder of versions if it is missing, remove what an interrupted process left, and choose a name.

        Args:
            root: The folder of all versions.
            name: What to call this one; None for the next number.
            fsync: Whether it must also survive a loss of power.

        Raises:
            UsageError: The name is none that a folder can have here.
            SinkError: There is such a version, another live process writes one, or the folder cannot be written.
        """
        if name is not None and not _is_name(name):
            raise UsageError("no name of a version", expected="that of a folder", found=repr(name))
        with sink_errors(root):
            unsynced = make_folder(root)
            inner = None
            while inner is None:  # another process may remove the folder before it is locked
                (root / WRITING).mkdir(exist_ok=True)
                inner = InnerFolder.take(root / WRITING)
            try:
                inner.clear()
                _refuse_other_link(root)
                number, name = _next(root, name)
            except BaseException:
                inner.release()
                raise
        return cls(root, name, inner.path / name, number, inner, fsync, unsynced)

    def publish(self) -> None:
        """Show the version, which is complete in the staging folder, and have the link point to it.

        Raises:
            SinkError: The file system refused something. The link then points to this version or still to the earlier.
        """
        with sink_errors(self.root):
            (self.staging / _NUMBER).write_text(f"{self._number}\n")
            self._sync(self.staging / _NUMBER, self.staging)
            self.staging.rename(self.root / self.name)
            # The link must not survive a loss of power that the folder does not.
            self._sync(self.root, *self._unsynced)
            link = self._inner.path / LATEST
            link.symlink_to(self.name)
            link.rename(self.root / LATEST)
            self._sync(self.root)

    def remove_old(self, keep: int | None) -> None:
        """Remove all but the newest versions, and give the lock back.

        Args:
            keep: How many stay; None for all.

        Raises:
            SinkError: One cannot be taken away.
        """
        with sink_errors(self.root):
            old = [] if keep is None else versions_in(self.root)[:-keep]
            for path in old:
                path.rename(self._inner.path / path.name)
        # Some file systems keep what a reader has open. The next one tries again.
        with suppress(OSError):
            self._inner.discard()
        self._inner.release()

    def abort(self) -> None:
        """Remove what was not published, and give the lock back. Raises no error, which could hide an earlier one."""
        with suppress(OSError, SinkError):
            if self._inner.is_held:
                self._inner.discard()
        self._inner.release()

    def _sync(self, *paths: Path) -> None:
        if self._fsync:
            for path in paths:
                sync(path)


def versions_in(root: Path) -> list[Path]:
    """Return the folders of all versions, the oldest first.

    Raises:
        OSError: The folder cannot be read.
    """
    return [path for _, path in sorted(_numbered(root))]


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir():
        if not path.name.startswith(".") and is_real_folder(path):
            with suppress(OSError, ValueError):
                yield int(read_file(path / _NUMBER)), path


def _next(root: Path, name: str | None) -> tuple[int, str]:
    """Return the number and the name of the next version."""
    numbers = [number for number, _ in _numbered(root)]
    if name is None:
        taken = [int(path.name) for path in root.iterdir() if path.name.isascii() and path.name.isdigit()]
        number = max([0, *numbers, *taken]) + 1
        return number, f"{number:06d}"
    if os.path.lexists(root / name):
        fix = "Choose another version, or remove it"
        raise SinkError("a version that is there already", file=root / name, fix=fix)
    return max([0, *numbers]) + 1, name


def _is_name(name: str) -> bool:
    return name == Path(name).name and not name.startswith(".") and "\0" not in name and name not in {"", LATEST}


def _refuse_other_link(root: Path) -> None:
    if os.path.lexists(root / LATEST) and not (root / LATEST).is_symlink():
        raise SinkError(f"{LATEST} is no link", file=root, fix="Remove it, or choose another folder")
