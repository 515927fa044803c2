"""How far an export is: a bar in bytes on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from .table import human_bytes

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 10.0
_TRUE = {"1", "ON", "YES", "TRUE"}


class Progress:
    """Shows the bytes delivered, on stderr. Use as a context manager; call it with the bytes that came since.

    Args:
        total_bytes: Bytes that this process will deliver.
        num_ranks: How many ranks deliver as much; what is shown is the sum of all.
        quiet: Whether to show nothing.
    """

    def __init__(self, total_bytes: int, num_ranks: int = 1, *, quiet: bool = False) -> None:
        self._total, self._num_ranks = total_bytes, num_ranks
        self._done = 0
        self._quiet = quiet or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _TRUE
        self._bar = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total * self._num_ranks,
                unit="B",
                unit_scale=True,
                desc="Writing model files",
                file=sys.stderr,
                leave=False,
            )
        return self

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes * self._num_ranks)
        elif not self._quiet and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            done, total = (human_bytes(part * self._num_ranks) for part in (self._done, self._total))
            print(f"{done} of {total} after {self._last_line - self._started:.0f} s", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
