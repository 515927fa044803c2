"""An asynchronous save: pieces are taken into memory of this rank first, and go on to another sink later."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import UsageError
from ..fence import Operation
from ..memory import bytes_of
from ..plan import Plan
from ..steps import Piece
from .base import Delivery, Sink
from .host_memory import host_memory

__all__ = ["StagedSink", "Staging", "check_staging", "prepare"]

Staging = Literal["auto", "device", "host"]
"""Where rows that are on a device wait: there, in pinned host memory, or there if it has room."""

# What training may need beyond what it has ever had.
_SPARE_SHARE = 0.05
_MAX_THREADS = 8
# Taken from the driver in one go, and freed one by one as they are written.
_SLAB_BYTES = 512 << 20
_ALIGNMENT = 512
# Of the kernel's flags of a process, as proc(5) tells where they are.
_PF_FORKNOEXEC = 0x40

# By device: what a save staged there. Torch keeps that memory when it is written, which is room for the next save.
_staged_before: dict[torch.device, int] = {}


def check_staging(staging: str) -> None:
    """Refuse a word that is none of `Staging`.

    Raises:
        UsageError: It is none.
    """
    if staging not in {"auto", "device", "host"}:
        raise UsageError("no such staging", expected="auto, device or host", found=repr(staging))


class StagedSink(Sink):
    """Takes all pieces into memory, in the dtype of the outputs; `deliver` hands them to the sink that it is around.

    The walk ends with `close`, after which nothing here depends on the module any more. Then `deliver`, the other
    sink's `close` and `commit`, and `release` may run on another thread. Host memory is that of the process, so that
    only one such sink is used at a time.

    Args:
        sink: A sink with delivery `"once"`.
        staging: Where rows that are on a device wait.
    """

    delivery: Delivery = "once"

    def __init__(self, sink: Sink, staging: Staging) -> None:
        assert sink.delivery == "once", "pieces of a sink for everyone are on every rank"
        self.sink = sink
        self._staging = staging
        self._num_bytes = self._device_bytes = 0
        self._device: torch.device | None = None
        self._is_on_device: bool | None = None
        self._has_memory = self._is_short_of_pinned = self._copies_to_host = False
        self._slab = torch.empty(0)
        self._pieces: deque[Piece] = deque()
        self._streams: set[Any] = set()
        self._copied: list[Any] = []
        self._threads = ExitStack()

    def card(self) -> str:
        """As the other sink does."""
        return self.sink.card()

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """As the other sink does."""
        return self.sink.begin(plan, cards)

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """As the other sink does."""
        self.sink.open(plan, rank, ticket)
        self._num_bytes = _share_bytes(plan)
        host_memory().begin()
        self._has_memory = True
        # What is computed might be rounded in another way by other numbers of threads.
        if not any(step.whole for step in plan.steps):
            self._threads.enter_context(_threads_for_copies())

    def write(self, piece: Piece) -> None:
        """Copy a piece."""
        device = piece.tensor.device
        if device.type != "cpu":
            self._device = device
            self._streams.add(torch.get_device_module(device).current_stream(device))
            if piece.tensor.numel() and self._stays(device) and self._copy_on_device(piece):
                return
        if piece.tensor.numel():
            self._copy(piece)
        else:
            self._pieces.append(Piece(piece.info, piece.first_row, piece.tensor.clone()))

    def close(self) -> None:
        """Take care that the module may change from now on.

        Copies to the host have ended, and those on several devices. Those on one are on the current stream: what is
        queued there later comes after them, and nobody waits.
        """
        if self._copies_to_host or len(self._streams) > 1:
            self._settle()
        self._threads.close()
        self._copied = [stream.record_event() for stream in self._streams]
        self._slab = torch.empty(0)
        if self._device is not None and self._device_bytes:
            _staged_before[self._device] = self._device_bytes

    def commit(self) -> None:
        """Do nothing: it is the other sink's turn, later."""

    def abort(self) -> None:
        """Drop what was copied, and abort the other sink."""
        with suppress(RuntimeError):  # of a device that is lost
            self._settle()
        self.sink.abort()
        self.release()

    def deliver(self, operation: Operation, delivered: Callable[[int], None]) -> None:
        """Hand everything to the other sink; memory on the device is freed on the way.

        Raises:
            ExportError: The other sink failed, or another rank.
        """
        with self._beside_training():
            while self._pieces:
                piece = self._pieces.popleft()
                operation.check()
                self.sink.write(piece)
                delivered(piece.num_bytes)
                del piece

    def release(self) -> None:
        """Give the memory back, which nobody may use any more; that of the host is pinned now if it was not."""
        self._pieces.clear()
        self._slab = torch.empty(0)
        if self._has_memory:
            self._has_memory = False
            host_memory().end()
            if self._device is not None and self._is_short_of_pinned:
                host_memory().prepare(0, self._device)

    def _settle(self) -> None:
        self._threads.close()
        while self._streams:
            self._streams.pop().synchronize()

    def _beside_training(self) -> AbstractContextManager[object]:
        """Enter the device, and a stream of its own: only the copies are waited for, and no other work has to wait."""
        if self._device is None:
            return nullcontext()
        module = torch.get_device_module(self._device)
        # A thread begins on the first device, whatever that of the process is.
        module.set_device(self._device)
        stream: Any = module.Stream(self._device)
        for event in self._copied:
            stream.wait_event(event)
        return stream  # type: ignore[no-any-return]

    def _stays(self, device: torch.device) -> bool:
        if self._is_on_device is None:
            self._is_on_device = self._staging == "device" or (
                self._staging == "auto" and _has_room(device, self._num_bytes)
            )
        return self._is_on_device

    def _copy_on_device(self, piece: Piece) -> bool:
        """Copy a piece on its device; return whether there was room."""
        tensor = piece.tensor
        try:
            room = self._take(tensor.nbytes, tensor.device)
        except torch.OutOfMemoryError:
            if self._staging == "device":
                raise
            self._is_on_device = False
            return False
        copy = room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._pieces.append(Piece(piece.info, piece.first_row, copy))
        return True

    def _take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return room on a device."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > _SLAB_BYTES // 8:  # else what is left of each slab would add up
            self._device_bytes += num_bytes
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if self._slab.numel() < size:
            left = max(self._num_bytes - self._device_bytes, 0)
            self._slab = torch.empty(max(size, min(_SLAB_BYTES, left)), dtype=torch.uint8, device=device)
            self._device_bytes += self._slab.numel()
        room, self._slab = self._slab[:num_bytes], self._slab[size:]
        return room

    def _copy(self, piece: Piece) -> None:
        """Copy a piece into host memory, cut where a slab ends."""
        data, info, memory = bytes_of(piece.tensor), piece.info, host_memory()
        self._copies_to_host = True
        begin = 0
        while begin < data.numel():
            room = memory.take(info.row_bytes, data.numel() - begin)
            room.copy_(data[begin : begin + room.numel()], non_blocking=True)
            rows = room.view(info.dtype).view(-1, *info.shape[1:]) if info.shape else room.view(info.dtype).view(())
            self._pieces.append(Piece(info, piece.first_row + begin // info.row_bytes, rows))
            begin += room.numel()
        if data.device.type != "cpu" and not memory.is_pinned:
            self._is_short_of_pinned = True


def prepare(plan: Plan, device: torch.device, staging: Staging, *, are_offloaded: bool) -> None:
    """Begin to get ready, on a thread, the host memory that such a sink will take of this rank.

    Args:
        plan: What will be saved.
        device: Where tensors are gathered, and lie unless they are offloaded.
        staging: As for the sink.
        are_offloaded: Whether some of them lie in host memory.
    """
    num_bytes = _share_bytes(plan)
    stay = staging == "device" or (staging == "auto" and device.type != "cpu" and _has_room(device, num_bytes))
    if are_offloaded or not stay:
        host_memory().prepare(num_bytes, torch.device("cpu") if stay else device)


def _share_bytes(plan: Plan) -> int:
    """Return the bytes that each rank delivers, about."""
    return -(-plan.num_bytes // len(plan.ranks))


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Tell whether a device has memory that training has never had; what torch keeps free, a step may need again."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return False
    free, total = module.mem_get_info(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    ours = min(_staged_before.get(device, 0), kept)
    return bool(free + ours >= num_bytes + _SPARE_SHARE * total)


@contextmanager
def _threads_for_copies() -> Iterator[None]:
    """Let torch copy and cast with several threads, also where a launcher gave it one."""
    before = torch.get_num_threads()
    num_cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # A fork waits forever for threads of OpenMP that its parent had: whoever forks sets one, and is right.
    most = 1 if _is_fork() else min(num_cores, _MAX_THREADS)
    torch.set_num_threads(max(before, most))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_fork() -> bool:
    """Tell whether this process was forked, and no other program was started in it."""
    try:
        flags = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return False
    return bool(int(flags) & _PF_FORKNOEXEC)
