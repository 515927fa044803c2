"""Looking at paths that anyone may have made: what cannot be looked at is not there, and no pipe is waited for."""

from __future__ import annotations

import errno
import os
import stat
from os import PathLike

__all__ = ["MAX_TEXT_BYTES", "is_file", "is_folder", "read_file"]

MAX_TEXT_BYTES = 64 << 20
"""Bytes that a config, a tokenizer's settings or a record may have."""


def is_file(path: os.DirEntry[str] | PathLike[str]) -> bool:
    """Tell whether this is a regular file or a link to one; not if nobody may, or can, look at it."""
    try:
        return path.is_file() if isinstance(path, os.DirEntry) else os.path.isfile(path)  # noqa: PTH113 - see is_folder
    except OSError:
        return False


def is_folder(path: os.DirEntry[str] | PathLike[str]) -> bool:
    """Tell whether this is a folder or a link to one; as `is_file`."""
    try:  # Path.is_dir raises for some of what os.path.isdir only denies, and an entry of os.scandir for others
        return path.is_dir() if isinstance(path, os.DirEntry) else os.path.isdir(path)  # noqa: PTH112
    except OSError:
        return False


def read_file(path: str | PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        max_bytes: What it may have.

    Raises:
        OSError: It cannot be read, is something else, or is larger.
    """
    # A pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it is no path
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
            text = os.strerror(number) if stat.S_ISDIR(status.st_mode) else "Not a regular file"
            raise OSError(number, text, os.fspath(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, which is too large", os.fspath(path))
        return file.read()
