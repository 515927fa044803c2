"""Host memory of this process in which saves are staged: taken once, kept for the next save, pinned in the meantime."""

from __future__ import annotations

import mmap
import os
import threading

import torch

from ..compat import before_threads_end, pin, unpin

__all__ = ["HostMemory", "host_memory"]

_SLAB_BYTES = 256 << 20
_TOUCH_BYTES = 16 << 20
_ALIGNMENT = 64


class _Slab:
    """Pages that forked processes share instead of copying them whenever they are written."""

    def __init__(self, num_bytes: int) -> None:
        with torch.inference_mode(mode=False):  # what is made in that mode cannot be written outside of it
            self.memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self.is_pinned = False

    def touch(self) -> None:
        """Make the system give the pages now. Other threads run meanwhile."""
        bytes_ = self.memory.numpy()
        for begin in range(0, len(bytes_), _TOUCH_BYTES):
            bytes_[begin : begin + _TOUCH_BYTES] = 0

    def close(self) -> None:
        """Unpin; the memory goes with the last tensor that shares it."""
        if self.is_pinned:
            unpin(self.memory)
            self.is_pinned = False


class HostMemory:
    """Slabs of host memory, which are handed out from the first to the last by one user at a time.

    Pinning takes seconds, so a thread does it between two uses, slab by slab; a user who comes early is not kept
    waiting, but gets slabs that are not pinned.
    """

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []
        self._position = self._offset = 0
        self._is_used = False
        # The system refuses to pin any more; to ask again for every save would take time for nothing.
        self._is_refused = False
        self._changing = threading.Lock()
        self._preparing: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.nbytes for slab in self._slabs)

    @property
    def is_pinned(self) -> bool:
        """Whether all slabs are pinned."""
        return all(slab.is_pinned for slab in self._slabs)

    def begin(self) -> None:
        """Hand out everything anew. Waits for the slab that is being prepared, if one is."""
        self._is_used = True
        with self._changing:
            self._position = self._offset = 0

    def take(self, row_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return room for as many whole rows as fit in one place, at least for one.

        Args:
            row_bytes: Bytes of a row.
            num_bytes: Bytes of all rows that are to go somewhere.
        """
        while self._position < len(self._slabs):
            slab = self._slabs[self._position].memory
            size = min((slab.nbytes - self._offset) // row_bytes * row_bytes, num_bytes)
            if size > 0:
                room = slab[self._offset : self._offset + size]
                self._offset += -(-size // _ALIGNMENT) * _ALIGNMENT
                return room
            self._position, self._offset = self._position + 1, 0
        self._slabs.append(_Slab(max(_SLAB_BYTES, row_bytes)))
        return self.take(row_bytes, num_bytes)

    def end(self) -> None:
        """Take everything back; nobody may use it any more."""
        self._is_used = False

    def prepare(self, num_bytes: int, device: torch.device) -> None:
        """Begin to get memory ready on a thread, so that the next use finds it there, and pinned.

        Args:
            num_bytes: Bytes that the next use needs; what is there already counts.
            device: From where copies will come; memory for a CPU is not pinned.
        """
        self._preparing = threading.Thread(
            target=self._prepare,
            args=(self._preparing, num_bytes, device),
            name="fsdp-export-prepare",
            daemon=False,
        )
        self._preparing.start()

    def wait(self) -> None:
        """Wait until everything is prepared."""
        if self._preparing is not None:
            self._preparing.join()

    def release(self) -> None:
        """Give all memory back to the system. Does nothing while somebody uses it."""
        self.wait()
        if not self._is_used:
            with self._changing:
                for slab in self._slabs:
                    slab.close()
                self._slabs.clear()
                self._is_refused = False

    def _prepare(self, earlier: threading.Thread | None, num_bytes: int, device: torch.device) -> None:
        if earlier is not None:
            earlier.join()
        position = 0
        while not self._is_used and (position < len(self._slabs) or self.num_bytes < num_bytes):
            with self._changing:
                if self._is_used:
                    return
                if position == len(self._slabs):
                    self._slabs.append(_Slab(min(_SLAB_BYTES, num_bytes - self.num_bytes)))
                    self._slabs[position].touch()
                slab = self._slabs[position]
                if device.type != "cpu" and not (slab.is_pinned or self._is_refused):
                    slab.is_pinned = pin(slab.memory, device)
                    self._is_refused = not slab.is_pinned
            position += 1


_memory = HostMemory()


def host_memory() -> HostMemory:
    """Return that of this process, of whose exporters only one saves at a time."""
    return _memory


def _forget() -> None:
    global _memory  # noqa: PLW0603  a fork has the memory of its parent, and none of its threads
    _memory = HostMemory()


os.register_at_fork(after_in_child=_forget)
# Pages are unpinned before they are unmapped.
before_threads_end(lambda: host_memory().release())
