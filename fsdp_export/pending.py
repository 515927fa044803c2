"""Saves that go on behind the training loop: one at a time in a process, finished before it ends, no error lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .compat import before_threads_end
from .errors import ExportError, SinkError, UsageError
from .fence import Fence
from .plan import Plan
from .sinks.huggingface import HuggingFaceSink, Report
from .sinks.staged import StagedSink
from .walk import Delivered, finish

__all__ = ["PendingSave", "finish_latest", "one_at_a_time", "start", "wait_for_latest", "write_staged"]

# After every write the thread waits for the interpreter, for as long as the training loop has it, and then has it in
# turn: the fewer the better. Where memory is scarce, long writes are slow; see sinks/files.py.
_WRITE_BYTES, _WRITE_BYTES_BESIDE_GPUS = 1 << 20, 32 << 20

_log = logging.getLogger("fsdp_export")


class PendingSave:
    """A save whose values are taken and which is being written. Every rank has one.

    Nobody needs to wait for it: the process finishes it before it ends, an error is raised by the next save, or logged
    at the end.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, write: Callable[[], Report]) -> None:
        self.path = path
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._is_told = False
        self._is_done = threading.Event()
        # No daemon: those are stopped wherever they are when the program ends.
        self._thread = threading.Thread(target=self._run, args=(write,), name="fsdp-export-save", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Tell whether it has ended, well or not. Not collective."""
        return self._is_done.is_set()

    def wait(self, timeout: float | None = None) -> Report:
        """Wait until the folder is complete. Not collective: a rank may wait or not.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Returns:
            What was written; on ranks other than the first without the names of removed files.

        Raises:
            TimeoutError: It has not ended yet. It goes on.
            ExportError: Something failed on some rank; every rank that waits gets the same error, as often as it does.
                The earlier checkpoint is intact.
        """
        if not self._is_done.wait(timeout):
            raise TimeoutError(f"{self.path} is not complete after {timeout:g} s")
        if self._error is not None:
            self._is_told = True
            raise self._error
        assert self._report is not None
        return self._report

    def join(self) -> None:
        """Wait until it has ended, well or not."""
        self._is_done.wait()

    def is_this_thread(self) -> bool:
        """Tell whether whoever asks is the thread that writes."""
        return self._thread is threading.current_thread()

    def untold_error(self) -> ExportError | None:
        """Wait until it has ended, and return its error if nobody was told. Whoever asks will tell."""
        self.join()
        if self._error is None or self._is_told:
            return None
        self._is_told = True
        kind = type(self._error) if isinstance(self._error, ExportError) else SinkError
        return kind(f"the last save in the background, into {self.path}, failed: {self._error}")

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._error is not None else "complete"
        return f"<save into {self.path}, {state}>"

    def _run(self, write: Callable[[], Report]) -> None:
        try:
            self._report = write()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised where somebody waits
            self._error = error
        finally:
            self._is_done.set()


_latest: PendingSave | None = None
# Held by the thread that takes the values of a save. Who is called by a save may ask for another one and gets an error.
_taking = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread takes the values of a save, and be the one that does.

    Raises:
        UsageError: The thread is that of a save in the background, which would wait for itself.
    """
    if _latest is not None and _latest.is_this_thread():
        raise UsageError("a save was called within another save", fix="Start it when that one is done")
    with _taking:
        yield


def start(sink: HuggingFaceSink, write: Callable[[], Report]) -> PendingSave:
    """Start a save, the only one of this process.

    Args:
        sink: Where it goes.
        write: What remains to be done, on a thread.
    """
    global _latest  # noqa: PLW0603  there is one main thread, and one save behind it
    assert _latest is None or _latest.done()
    sink.write_bytes = _WRITE_BYTES_BESIDE_GPUS if torch.accelerator.is_available() else _WRITE_BYTES
    _latest = PendingSave(sink.destination, write)
    return _latest


def write_staged(
    staged: StagedSink, sink: HuggingFaceSink, plan: Plan, fence: Fence, *, delivered: Delivered, started: float
) -> Report:
    """Deliver what was staged to the sink that it is for. Collective: every rank of the fence must call this.

    Args:
        staged: Has all pieces.
        sink: The sink that it is around.
        plan: What was staged.
        fence: A fence in the background, which nothing else uses.
        delivered: Progress.
        started: When the save began.
    """
    try:
        with fence.operation("the background of Exporter.save") as operation:
            staged.deliver(operation, delivered)
            finish(sink, operation, is_lead=fence.is_lead)
    except BaseException:
        staged.abort()
        raise
    staged.release()
    return sink.report(plan, time.perf_counter() - started)


def wait_for_latest() -> None:
    """Wait until the latest save has ended."""
    if _latest is not None:
        _latest.join()


def finish_latest() -> None:
    """Wait until the latest save has ended.

    Raises:
        ExportError: It failed, and nobody was told.
    """
    error = _latest.untold_error() if _latest is not None else None
    if error is not None:
        raise error


def _finish_at_the_end() -> None:
    try:
        finish_latest()
    except ExportError as error:
        _log.error("%s", error)


def _forget() -> None:
    """Leave the save to the process that was forked from: no thread of it is here."""
    global _latest, _taking
    _latest, _taking = None, threading.RLock()


# Registered after the pools of threads, which `walk` imports: so it comes before them.
before_threads_end(_finish_at_the_end)
os.register_at_fork(after_in_child=_forget)
