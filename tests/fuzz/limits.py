"""What an input may cost, and what it must never do: run, write elsewhere, take long, fill the memory."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz.pickles import CANARY

__all__ = ["ExceededError", "guarded", "limit_process", "watched"]

MAX_EXTRA_BYTES = 64 << 20
MAX_CPU_SECONDS = 5.0
MAX_SECONDS = 60.0
_ADDRESS_SPACE_BYTES = 1 << 30
_NOBODY = 65_534

_RUNS = (
    "os.system",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_HARMLESS = ("/dev/null",)


class ExceededError(BaseException):
    """An input took too long. No `except Exception` of what is tested catches it."""


class _Audit:
    """Notes events of the interpreter while it is on. Hooks stay for as long as the process lives."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        self.root = ""
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in _RUNS or (event == "import" and str(arguments[0]).startswith(CANARY)):
            self.events.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            path = arguments[0]
            text = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
            is_inside = not Path(text).is_absolute() or text.startswith((self.root, *_HARMLESS))
            if (
                not is_inside
                and not text.endswith(".pyc")
                and f".pyc.{os.getpid()}" not in text
                and "__pycache__" not in text
            ):
                self.events.append(f"open {text!r} to write")


_audit: _Audit | None = None


def limit_process() -> None:
    """Bound what this process may take at all; call it once, in a process that ends with its work."""
    used = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def watched(root: Path) -> Iterator[list[str]]:
    """Collect what the block runs, imports or writes outside of a folder."""
    global _audit  # noqa: PLW0603 - the hook cannot be taken out again
    if _audit is None:
        _audit = _Audit()
    _audit.events, _audit.root, _audit.is_on = [], f"{root}{os.sep}", True
    try:
        yield _audit.events
    finally:
        _audit.is_on = False


@contextmanager
def guarded() -> Iterator[list[int]]:
    """End a block that takes too long, and measure by how many bytes the resident memory grew in it, at most.

    Raises:
        ExceededError: It took too long.
    """
    growth: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        # It might be raised where nothing lets it through, as in a callback: again, until the block is left.
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        raise ExceededError("waited too long" if number == signal.SIGALRM else "took too long")

    old = [(number, signal.signal(number, stop)) for number in (signal.SIGALRM, signal.SIGPROF)]
    before = _restart_peak()
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
    try:
        yield growth
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in old:
            signal.signal(number, handler)
        growth.append(_peak() - before)


@contextmanager
def unprivileged(*, is_on: bool) -> Iterator[None]:
    """Be a user to whom permissions apply, if this process is the superuser's."""
    if not is_on or os.geteuid() != 0:
        yield
        return
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def _restart_peak() -> int:
    """Let the peak of the resident memory begin anew where the system can, and return it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
