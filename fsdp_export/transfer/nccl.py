"""A communicator of NCCL between programs that torch did not start together, none of whose waits lasts for ever.

The process groups of torch need a store, ranks of their own and the same version on both sides; an engine that was
started by itself offers no more than to join a communicator. NCCL is called through ctypes, in the library that torch
brings. The communicator is made as a non-blocking one, so that no call waits inside of the library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import SinkError, UsageError

__all__ = ["UNIQUE_ID_BYTES", "Communicator", "load_library", "new_unique_id"]

UNIQUE_ID_BYTES = 128

_log = logging.getLogger("fsdp_export")

_LIBRARY = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_ABORT_SECONDS = 5.0
_SPIN_SECONDS, _PAUSE_SECONDS = 1e-4, 1e-3

Check = Callable[[], None]
"""Raises if what is waited for cannot come any more."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """The configuration of NCCL 2.14, which all later versions take: what they have added stays as it is there."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400

_pointer = ctypes.c_void_p
_collective = [_pointer, _pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _pointer, _pointer]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ncclGetUniqueId": (ctypes.c_int, [ctypes.POINTER(_UniqueId)]),
    "ncclCommInitRankConfig": (
        ctypes.c_int,
        [ctypes.POINTER(_pointer), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)],
    ),
    "ncclCommGetAsyncError": (ctypes.c_int, [_pointer, ctypes.POINTER(ctypes.c_int)]),
    "ncclCommAbort": (ctypes.c_int, [_pointer]),
    "ncclAllReduce": (ctypes.c_int, _collective),
    "ncclBroadcast": (ctypes.c_int, _collective),
    "ncclGetErrorString": (ctypes.c_char_p, [ctypes.c_int]),
    "ncclGetLastError": (ctypes.c_char_p, [_pointer]),
}


@functools.cache
def load_library() -> Any:
    """Return NCCL as torch uses it, or else as the loader finds it.

    Raises:
        UsageError: There is none, or one before 2.14.
    """
    for path in (*filter(Path.exists, _candidates()), _LIBRARY):
        try:
            library = ctypes.CDLL(str(path))
            break
        except OSError:
            continue
    else:
        raise UsageError(
            "to send to an engine over NCCL needs NCCL", expected=_LIBRARY, fix="Use a torch that was built for CUDA"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise UsageError(f"{_LIBRARY} has no {name}", expected="NCCL 2.14 or later") from error
        function.restype, function.argtypes = result, arguments
    return library


def _candidates() -> Iterator[Path]:
    yield Path(torch.__file__).parent / "lib" / _LIBRARY
    if importlib.util.find_spec("nvidia") is not None:
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Path(folder) / "lib" / _LIBRARY


def new_unique_id(library: Any = None) -> bytes:
    """Return what the ranks of one communicator find each other by. Whoever makes it must be one of them."""
    library = library or load_library()
    unique_id = _UniqueId()
    _check_result(library, library.ncclGetUniqueId(ctypes.byref(unique_id)), "to make a unique id")
    return bytes(unique_id)


class Communicator:
    """Processes with a GPU each, of which one sends to all others.

    Every wait polls, and raises what `check` raises, what NCCL reports, or that time is up; after that the communicator
    is of no use any more, and has been aborted. One thread at a time may use it.

    Args:
        unique_id: What `new_unique_id` returned on one of the ranks.
        rank: Of this process.
        num_ranks: How many there are. All must come at about the same time.
        device: This process's GPU; no other rank has it.
        timeout: Seconds to wait, each time.
        check: Called while the others are waited for.
        library: For tests.

    Raises:
        SinkError: The others did not come in time, or NCCL failed.
    """

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        num_ranks: int,
        device: torch.device,
        *,
        timeout: float,
        check: Check = lambda: None,
        library: Any = None,
    ) -> None:
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise UsageError("no unique id of NCCL", expected=f"{UNIQUE_ID_BYTES} bytes", found=len(unique_id))
        self.device, self.num_ranks = device, num_ranks
        self._library = library or load_library()
        self._timeout = timeout
        comm = ctypes.c_void_p()
        self._comm: ctypes.c_void_p | None = comm
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, blocking=0)
        self._run(
            lambda: self._library.ncclCommInitRankConfig(
                ctypes.byref(comm), num_ranks, _UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
            ),
            f"to meet {num_ranks - 1} ranks on {device}",
            check,
        )

    def warm_up(self, check: Check = lambda: None) -> None:
        """Sum one float32 over all ranks, which some receivers want before anything else."""
        with _on(self.device):
            number = torch.zeros(1, device=self.device)
            self._run(
                lambda: self._library.ncclAllReduce(
                    number.data_ptr(), number.data_ptr(), 1, _FLOAT32, _SUM, self._comm, _stream(self.device)
                ),
                "a first sum",
                check,
                is_queued=True,
            )

    def broadcast(self, buffer: torch.Tensor, *, root: int = 0, check: Check = lambda: None) -> None:
        """Send a buffer from one rank to all others, on the current stream; return when it has been sent.

        Args:
            buffer: Bytes on the device; of the same number on all ranks.
            root: The rank that sends.
            check: Called while the device is waited for.
        """
        if buffer.device != self.device:
            fix = "Call torch.cuda.set_device() before anything else"
            raise SinkError("a bucket on another device", expected=self.device, found=buffer.device, fix=fix)
        if not buffer.numel():
            return
        address = buffer.data_ptr()
        self._run(
            lambda: self._library.ncclBroadcast(
                address, address, buffer.numel(), _UINT8, root, self._comm, _stream(self.device)
            ),
            f"to send {buffer.numel():,} bytes",
            check,
            is_queued=True,
        )

    def abort(self) -> None:
        """Leave, whatever the other ranks do; what is still under way on the device ends."""
        comm, self._comm = self._comm, None
        if not comm:
            return

        def leave() -> None:
            with _on(self.device):
                self._library.ncclCommAbort(comm)

        # It may wait for kernels, or for a thread of its own.
        thread = threading.Thread(target=leave, name="fsdp-export-nccl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        if thread.is_alive():
            _log.warning("NCCL did not leave a communicator on %s within %g s", self.device, _ABORT_SECONDS)

    def _run(self, call: Callable[[], int], what: str, check: Check, *, is_queued: bool = False) -> None:
        """Make a call of NCCL, and wait until it is done: in the library and, if it is queued, on the device."""
        if self._comm is None:
            raise SinkError("a communicator that was aborted cannot be used")
        deadline = time.monotonic() + self._timeout

        def attend() -> None:
            check()
            if time.monotonic() > deadline:
                raise SinkError(f"NCCL took more than {self._timeout:g} s {what}", fix="Is every receiver still there?")

        try:
            with _on(self.device):
                _check_result(self._library, call(), what, self._comm)
                _poll(lambda: self._state(what) == _SUCCESS, attend)
                if is_queued:
                    is_done = _recorded(self.device)
                    _poll(lambda: self._state(what) == _SUCCESS and is_done(), attend)
        except BaseException:
            self.abort()
            raise

    def _state(self, what: str) -> int:
        state = ctypes.c_int()
        _check_result(self._library, self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)), what)
        _check_result(self._library, state.value, what, self._comm)
        return state.value


def _check_result(library: Any, result: int, what: str, comm: ctypes.c_void_p | None = None) -> None:
    if result not in {_SUCCESS, _IN_PROGRESS}:
        text = library.ncclGetErrorString(result).decode()
        if details := (library.ncclGetLastError(comm) or b"").decode().strip():
            text += f" ({details})"
        raise SinkError(f"NCCL failed {what}", found=text, fix="NCCL_DEBUG=WARN tells more, on both sides")


def _poll(is_done: Callable[[], bool], attend: Check) -> None:
    begin = time.monotonic()
    while not is_done():
        attend()
        if time.monotonic() - begin > _SPIN_SECONDS:
            time.sleep(_PAUSE_SECONDS / 5)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _recorded(device: torch.device) -> Callable[[], bool]:
    """Return what tells whether all that was queued on the current stream is done."""
    return torch.cuda.current_stream(device).record_event().query  # type: ignore[no-any-return]
