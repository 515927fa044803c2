"""From device memory to files through a fixed ring of pinned host memory."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..memory import bytes_of

__all__ = ["PinnedRing"]

_SLOT_BYTES = 32 << 20
_NUM_SLOTS = 8
_NUM_THREADS = 4

Write = Callable[[memoryview, int], None]
"""Writes bytes at an offset."""


class PinnedRing:
    """Copies tensors to the host on streams of its own and writes them from threads, in no particular order.

    Args:
        kind: The type of the devices that tensors are on; a module may lie on several.
    """

    def __init__(self, kind: str) -> None:
        self._module = torch.get_device_module(kind)
        self._streams: dict[torch.device, Any] = {}
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_NUM_SLOTS):
            self._free.put(torch.empty(_SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fsdp-export-write")
        self._pending: list[Future[None]] = []

    def write(self, tensor: torch.Tensor, offset: int, write: Write) -> None:
        """Queue the bytes of a contiguous tensor. Waits only for a free slot.

        Args:
            tensor: A tensor on a device. It may be dropped at once.
            offset: Where its first byte goes.
            write: Called from a thread for every slot.

        Raises:
            Exception: What an earlier `write` raised.
        """
        flat, stream = bytes_of(tensor), self._stream(tensor.device)
        stream.wait_stream(self._module.current_stream(tensor.device))
        for begin in range(0, flat.numel(), _SLOT_BYTES):
            self._raise_first()
            slot = self._free.get()
            chunk = flat[begin : begin + _SLOT_BYTES]
            with stream:
                slot[: chunk.numel()].copy_(chunk, non_blocking=True)
                event = stream.record_event()
            self._pending.append(self._threads.submit(self._drain, slot, chunk.numel(), event, offset + begin, write))
        tensor.record_stream(stream)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            Exception: What a `write` raised first.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Stop the threads and drop the memory, and what is still queued."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._module.Stream(device)
        return self._streams[device]

    def _drain(self, slot: torch.Tensor, num_bytes: int, event: torch.Event, offset: int, write: Write) -> None:
        try:
            event.synchronize()
            write(slot.numpy().data[:num_bytes], offset)
        finally:
            self._free.put(slot)

    def _raise_first(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
