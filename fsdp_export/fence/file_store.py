"""The file of torch's `FileStore`: mended where a rank was killed as it wrote, or torch would read it for ever.

It is a log: for every key that is set, the key and the value, each behind its length in 4 bytes (`FileStore.cpp`).
Torch writes the four parts one by one under a lock, and reads on and on at the end of a record that is not whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import struct
import time
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from ..errors import RankError

__all__ = ["Log", "log_of"]

_LENGTH = struct.Struct("=I")
_FIRST = _LENGTH.pack(9) + b"refcount/"
# What is unfinished that long was left; the lock makes sure.
_UNFINISHED_SECONDS, _LOCKED_SECONDS, _PAUSE = 0.1, 10.0, 1e-3


def log_of(store: Store) -> Log | None:
    """Return the log that a store keeps its keys in, None if it keeps them elsewhere or in another way."""
    inner: Any = store  # torch's stubs lack `underlying_store`
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    path = getattr(inner, "path", None)
    if not isinstance(path, str):
        return None
    log = Log(Path(path))
    return log if log.is_log() else None


class Log:
    """The file of a `FileStore`.

    What remains is the instant between `mend` and torch's own look: whoever is killed there is not seen.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._end = 0

    def is_log(self) -> bool:
        """Tell whether the file begins as `FileStore` begins it."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb", buffering=0) as file:
            return file.read(len(_FIRST)) == _FIRST
        return False

    def mend(self) -> None:
        """Wait until nobody is writing, and cut off a record whose writer is gone.

        Raises:
            RankError: Somebody hangs in the file, as torch does if it comes to such a record first.
        """
        # What cannot be opened is torch's to complain of, or to make anew: whoever leaves last removes it.
        with contextlib.suppress(OSError), self._path.open("r+b", buffering=0) as file:
            seconds = 0.0  # slept, not passed: the job may have been suspended meanwhile
            while self._is_unfinished(file):
                time.sleep(_PAUSE)
                seconds += _PAUSE
                if seconds > _LOCKED_SECONDS:
                    raise RankError(
                        f"a rank was killed as it wrote to the store of the process group, {self._path}, "
                        f"and another one that reads it has had it locked for {_LOCKED_SECONDS:g} s"
                    )
                if seconds > _UNFINISHED_SECONDS:
                    self._cut(file)

    def _cut(self, file: io.FileIO) -> None:
        try:
            # Never waited for: who frees a `FileStore` waits for it too, and lets no other thread run meanwhile.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            if self._is_unfinished(file):
                file.truncate(self._end)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _is_unfinished(self, file: io.FileIO) -> bool:
        """Read what has been written since the last call; tell whether a part of a record is the last."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._end:
            self._inode, self._end = status.st_ino, 0
        file.seek(self._end)
        new = file.read()
        begin = 0
        while (end := _end_of_part(new, _end_of_part(new, begin))) <= len(new):
            begin = end
        self._end += begin
        return begin < len(new)


def _end_of_part(log: bytes, begin: int) -> int:
    """Return where a key or a value ends, beyond the log's end if it is not whole."""
    begin_of_text = begin + _LENGTH.size
    if begin_of_text > len(log):
        return begin_of_text
    return begin_of_text + int(_LENGTH.unpack_from(log, begin)[0])
