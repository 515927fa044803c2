"""Getting files to the disk while more of them is still being written.

The kernel starts on its own only when a share of all memory is dirty, which a checkpoint may never reach; an fsync at
the end would then do all the work of the disk after all the work of the memory.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Writeback"]

_BYTES_BETWEEN = 256 << 20


class Writeback:
    """Syncs files from a thread, each after so many bytes, and all of them in the end.

    Args:
        is_on: Whether to do anything at all.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._thread: ThreadPoolExecutor | None = None
        self._unsynced: dict[int, int] = {}
        self._pending: dict[int, Future[None]] = {}

    def wrote(self, file: int, num_bytes: int) -> None:
        """Take note that bytes were written, or soon will be, to an open file.

        Raises:
            OSError: An earlier sync of the file failed.
        """
        if not self._is_on:
            return
        self._unsynced[file] = self._unsynced.get(file, 0) + num_bytes
        pending = self._pending.get(file)
        if self._unsynced[file] < _BYTES_BETWEEN or (pending is not None and not pending.done()):
            return
        if pending is not None:
            pending.result()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="fsdp-export-sync")
        self._pending[file] = self._thread.submit(os.fdatasync, file)
        self._unsynced[file] = 0

    def finish(self, file: int) -> None:
        """Wait until the disk has all of a file. Every write must have ended.

        Raises:
            OSError: A sync of the file failed, now or earlier.
        """
        if not self._is_on:
            return
        if (pending := self._pending.pop(file, None)) is not None:
            pending.result()
        os.fsync(file)

    def close(self) -> None:
        """Stop the thread. Files must be closed only after this."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._pending.clear()
        self._unsynced.clear()
