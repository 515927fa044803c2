"""A process group of torch with processes that torch did not start together, none of whose waits lasts for ever."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from .. import compat
from ..errors import SinkError, UsageError

__all__ = ["SenderGroup"]

_log = logging.getLogger("fsdp_export")

_CHECK_SECONDS = 0.05
_SPIN_SECONDS, _PAUSE_SECONDS = 1e-3, 1e-3
_ABORT_SECONDS = 5.0
# Long after any time-out of ours: what NCCL does then is to end the process.
_WATCHDOG = timedelta(days=1)
# What gloo does then is to end what nobody waits for any more.
_MARGIN = timedelta(seconds=5)

# By port: until when something that a group of ours has left behind may have its store.
_taken_until: dict[int, float] = {}

Check = Callable[[], None]
"""Raises if what is waited for cannot come any more."""


class SenderGroup:
    """A process group of this process, which is its rank 0, and others, to which it broadcasts.

    The others find it by a TCP store of this process: `rendezvous("tcp://address:port", ...)`, and a process group of
    the same name below the prefix of that name. Every wait polls, and raises what `check` raises, what the backend
    reports, or that time is up; after that the group has been aborted. One thread at a time may use it, and any thread
    may abort it.

    Args:
        num_ranks: How many there are, with this one.
        backend: `"nccl"` or `"gloo"`.
        name: Of the group; to be used once.
        timeout: Seconds to wait for the others, each time.
        port: Of the store; 0 for a free one.

    Attributes:
        port: Of the store.

    Raises:
        SinkError: The port is taken.
    """

    def __init__(self, num_ranks: int, *, backend: str, name: str, timeout: float, port: int = 0) -> None:
        if backend not in {"nccl", "gloo"}:
            raise UsageError("no such backend", expected="nccl or gloo", found=backend)
        self.num_ranks, self.backend, self.name = num_ranks, backend, name
        self._timeout = timeout
        self._is_aborted = threading.Event()
        self._backend: Any = None
        self._at_end: weakref.finalize[..., SenderGroup] | None = None
        self._store: TCPStore | None = _open_store(port, timeout)
        self.port: int = self._store.port

    def join(self, check: Check = lambda: None) -> None:
        """Make the group, at the time at which the others do.

        Raises:
            SinkError: They did not come.
        """

        def make() -> None:
            whole = self._store
            if whole is None:
                return
            timeout = _WATCHDOG if self.backend == "nccl" else timedelta(seconds=self._timeout) + _MARGIN
            store = PrefixStore(self.name, whole)
            backend = compat.new_backend(self.backend, store, 0, self.num_ranks, name=self.name, timeout=timeout)
            if self.backend == "nccl":
                # Or it complains at the end of the program, and may wait for the others.
                self._at_end = weakref.finalize(self, _abort, backend)
            self._backend = backend
            if self._is_aborted.is_set():
                self.abort()

        self._run(make, f"to meet {self.num_ranks - 1} other ranks", check)

    def require(self, device: torch.device) -> None:
        """Check that tensors can be sent from a device.

        Raises:
            UsageError: They cannot.
        """
        if self.backend == "nccl" and device.type != "cuda":
            raise UsageError("NCCL sends from a GPU", found=f"tensors on {device}", fix="Use backend='gloo'")

    def broadcast(self, tensor: torch.Tensor, check: Check = lambda: None) -> None:
        """Send a tensor to all others, on the current stream, and return when it has been sent.

        With gloo that is when the system has taken it.

        Raises:
            SinkError: It was not.
        """
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

        def send() -> None:
            # Whoever is the last to let go of a backend waits for what is under way: this thread.
            backend = self._backend
            with torch.cuda.stream(stream):
                work = compat.broadcast(backend, tensor)
                begin = time.monotonic()
                while not work.is_completed():
                    if time.monotonic() - begin > _SPIN_SECONDS:
                        time.sleep(_PAUSE_SECONDS)
                work.wait()

        self._run(send, f"to send {tensor.nbytes:,} bytes", check)

    def abort(self) -> None:
        """Leave, whatever the others do; what is under way ends."""
        self._is_aborted.set()
        # Else who waits for others in the store would go on to, and the next group find the port taken.
        self._store = None
        _taken_until[self.port] = time.monotonic() + self._timeout + 2 * _MARGIN.total_seconds()
        backend, self._backend = self._backend, None
        if backend is None or self._at_end is None:
            return
        self._at_end.detach()
        thread = threading.Thread(target=_abort, args=(backend,), name="fsdp-export-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        if thread.is_alive():
            _log.warning("NCCL does not let go of a process group with an engine; it is left to itself")

    def _run(self, call: Callable[[], None], what: str, check: Check) -> None:
        """Call something that may never return, on a thread that nobody has to wait for."""
        self._require_membership(what)
        done = threading.Event()
        errors: list[BaseException] = []
        arguments = (call, errors, done)
        threading.Thread(target=_call, args=arguments, name="fsdp-export-group", daemon=True).start()
        try:
            self._wait(done, what, check)
        except BaseException:
            self.abort()
            raise
        if errors:
            self.abort()
            raise SinkError(f"failed {what}", found=_first_line(errors[0])) from errors[0]

    def _wait(self, done: threading.Event, what: str, check: Check) -> None:
        deadline = time.monotonic() + self._timeout
        while not done.wait(_CHECK_SECONDS):
            check()
            self._require_membership(what)
            if time.monotonic() > deadline:
                raise SinkError(f"failed {what} within {self._timeout:g} s", fix="Look at the log of the engine")

    def _require_membership(self, what: str) -> None:
        if self._is_aborted.is_set():
            raise SinkError(f"failed {what}: the process group was left")


def _open_store(port: int, timeout: float) -> TCPStore:
    """Listen on a port, once a group before has let go of it."""
    wait = timedelta(seconds=timeout)
    while True:
        try:
            return TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=wait)
        except (RuntimeError, ValueError) as error:
            if time.monotonic() > _taken_until.get(port, 0):
                raise SinkError(
                    f"cannot listen on port {port}", found=_first_line(error), fix="Name another one"
                ) from error
        time.sleep(_CHECK_SECONDS)


def _call(call: Callable[[], None], errors: list[BaseException], done: threading.Event) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  whoever waits raises it
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep the group and its store
        errors.append(error)
    finally:
        done.set()


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
