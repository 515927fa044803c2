"""The wire of checkpoint-engine to a worker of an engine on the same device: ZMQ messages about memory that both see.

We bind, the worker connects, and answers every message with empty bytes, or with a traceback as text:

    (function, arguments)                       the memory, uint8: the worker calls the function
    [{name, dtype, shape, offset}, ...]         a bucket of tensors in it; free to be written again once answered
    None                                        that was all: the worker drops the memory
    None                                        the worker finishes its weights, and is done
    an exception                                instead of any of these: the update is off, the worker raises it

Up to checkpoint-engine 0.3 the worker does all that remains at the first None, and hangs up. Nobody says which kind it
is; so the second None is sent to all, and one that hangs up instead of answering is done, too. Whether it got there,
only the engine's answer to the request that started the update tells.

What we send is pickled since the protocol demands it. What comes back is text, and nothing of it is ever unpickled.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import SinkError, UsageError

__all__ = ["WorkerLink"]

_POLL_MILLISECONDS = 50
_SECONDS_FOR_LAST_WORDS = 1.0
_LINGER_MILLISECONDS = 1000
_MAX_TRACEBACK_CHARACTERS = 2000


class WorkerLink:
    """Talks with one worker about one update. One thread at a time may use it, but any may `stop` it.

    The socket is a DEALER that speaks as a REQ does: that one could not say that an update is off while it waits for an
    answer, and the worker of a trainer that gave up would wait for ever.

    Args:
        address: The ZMQ address that the worker will connect to.
        worker: What errors call the worker.
        timeout: Seconds to wait for the worker, each time.
        watch: Called while the worker is waited for; raises if the engine failed, and tells whether it is done.

    Raises:
        UsageError: pyzmq is not installed.
        SinkError: The address cannot be bound.
    """

    def __init__(self, address: str, *, worker: str, timeout: float, watch: Callable[[], bool]) -> None:
        try:
            import zmq
        except ImportError as error:
            fix = "Run: pip install 'fsdp-export[ipc]'"
            raise UsageError("pyzmq, which talks to engines on the same GPUs, is not installed", fix=fix) from error
        self._zmq = zmq
        self._worker, self._timeout, self._watch = worker, timeout, watch
        self._is_stopped = threading.Event()
        self._has_met = self._is_off = False
        context: Any = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise SinkError(f"{address} cannot be bound ({os.strerror(error.errno or 0)})") from error

    def meet(self, fix: str) -> None:
        """Wait for the worker to connect.

        Args:
            fix: What to look at if it does not.

        Raises:
            SinkError: It does not, or `watch` raised.
        """
        self._wait(lambda: self._polls(self._zmq.POLLOUT, _POLL_MILLISECONDS), "connect", fix)
        self._has_met = True

    def ask(self, message: object, what: str) -> None:
        """Send a message, and wait until the worker has done what it says.

        Args:
            message: One of those that the wire knows.
            what: What errors call it.

        Raises:
            SinkError: The worker failed, is gone, or does not answer in time; or `watch` raised.
        """
        answer = self._answer(what) if self._send(message) else None
        if answer is None:
            self._wait_for_a_reason()
            raise SinkError(f"{self._worker} hung up before it had taken {what}", fix="Look at the log of the engine")
        if answer:
            text = answer.decode(errors="replace")[-_MAX_TRACEBACK_CHARACTERS:]
            raise SinkError(f"{self._worker} failed to take {what}", found=text.strip())

    def finish(self) -> None:
        """Let a worker that has dropped the memory finish its weights, whichever way it ends, and hang up.

        Raises:
            SinkError: As `ask`.
        """
        answer = self._answer("the end of the weights") if self._send(None) else None
        self._socket.close()
        if answer:
            text = answer.decode(errors="replace")[-_MAX_TRACEBACK_CHARACTERS:]
            raise SinkError(f"{self._worker} failed to finish its weights", found=text.strip())

    def stop(self) -> None:
        """Make whoever waits for the worker give up soon."""
        self._is_stopped.set()

    def abort(self, reason: str) -> None:
        """Tell the worker that the update is off, as soon as it listens, and hang up. Returns at once.

        Args:
            reason: What the worker raises.
        """
        if self._is_off or self._socket.closed:
            return
        self._is_off = True
        farewell = RuntimeError(reason)
        if self._say_farewell(farewell) or self._has_met:
            self._socket.close(_LINGER_MILLISECONDS)
        else:
            # The engine may have been asked already: its worker would wait for us for ever.
            threading.Thread(target=self._abort_late, args=(farewell,), name="fsdp-export-abort", daemon=True).start()

    def _abort_late(self, farewell: Exception) -> None:
        deadline = time.monotonic() + self._timeout
        with suppress(self._zmq.ZMQError):  # of a context that ends with the process
            while not self._say_farewell(farewell) and time.monotonic() < deadline:
                self._polls(self._zmq.POLLOUT, _POLL_MILLISECONDS)
            self._socket.close(_LINGER_MILLISECONDS)

    def _say_farewell(self, farewell: Exception) -> bool:
        """Send it twice: a worker that has no memory yet takes the first for that, complains, and waits for another."""
        return self._send(farewell) and self._send(farewell)

    def _send(self, message: object) -> bool:
        """Send a message; tell whether there is a worker."""
        try:
            self._socket.send_multipart([b"", pickle.dumps(message)], self._zmq.DONTWAIT)
        except self._zmq.Again:
            return False
        return True

    def _answer(self, what: str) -> bytes | None:
        """Wait for an answer; return None if the worker hung up."""

        def has_answered_or_gone() -> bool:
            if self._polls(self._zmq.POLLIN, _POLL_MILLISECONDS):
                return True
            return not self._polls(self._zmq.POLLOUT)

        self._wait(has_answered_or_gone, f"take {what}", "Look at the log of the engine, or raise timeout")
        if not self._polls(self._zmq.POLLIN):
            return None
        frames: list[Any] = self._socket.recv_multipart()
        return bytes(frames[-1])

    def _polls(self, event: int, milliseconds: int = 0) -> bool:
        return bool(self._socket.poll(milliseconds, event))

    def _wait(self, is_over: Callable[[], bool], what: str, fix: str) -> None:
        """Wait for what the worker is to do, as long as there is hope."""
        deadline, has_ended = time.monotonic() + self._timeout, False
        while not is_over():
            self._check()
            if not has_ended and self._watch():
                # What the worker sent last may still be on its way.
                deadline, has_ended = time.monotonic() + _SECONDS_FOR_LAST_WORDS, True
            if time.monotonic() > deadline:
                if has_ended:
                    raise SinkError(f"the engine says that it is done, but {self._worker} did not {what}", fix=fix)
                raise SinkError(f"{self._worker} did not {what} within {self._timeout:g} s", fix=fix)

    def _check(self) -> None:
        if self._is_stopped.is_set():
            raise SinkError(f"{self._worker} is not waited for any more")

    def _wait_for_a_reason(self) -> None:
        """Give the engine a moment to tell why its worker hung up, which `watch` raises."""
        deadline = time.monotonic() + _SECONDS_FOR_LAST_WORDS
        while time.monotonic() < deadline:
            self._check()
            self._watch()
            time.sleep(_POLL_MILLISECONDS / 1000)
