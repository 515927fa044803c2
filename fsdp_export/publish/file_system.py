"""File-system calls of the publication: making folders, making them durable, errors with a way out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ..errors import SinkError

__all__ = ["is_real_folder", "make_folder", "sink_errors", "sync", "sync_folders"]

_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP}
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space there and export again"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Make it writable, or export into another folder"),
}


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it, where they are missing; return those that hold a name more.

    Raises:
        SinkError: A file stands where a folder is needed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise SinkError(
            "a file stands where a folder is needed",
            file=error.filename,
            fix="Remove it, or export into another folder",
        ) from None
    return [path.parent for path in missing]


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable; a folder only where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno in _CANNOT_SYNC_FOLDERS and path.is_dir()):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Make the folder durable, and those inside it that hold, or held, these files."""
    inside = {folder / parent for name in names for parent in PurePosixPath(name).parents}
    for path in sorted(inside | {folder}, reverse=True):
        if path.is_dir():
            sync(path)


def is_real_folder(path: Path) -> bool:
    """Tell whether this is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


@contextmanager
def sink_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into ours, with the file's name."""
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"{error.filename or folder} cannot be changed ({error.strerror})",
            fix=_WAYS_OUT.get(error.errno or 0, "Export again: an interrupted export is first finished or removed"),
        ) from error
