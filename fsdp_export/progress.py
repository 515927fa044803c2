"""How far an export is: a bar in bytes on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

import click

from .table import human_bytes

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 10.0
_TRUE = {"1", "ON", "YES", "TRUE"}


class Progress:
    """Shows the bytes delivered, on stderr. Use as a context manager; call it with the bytes that came since.

    Args:
        total_bytes: Bytes that all ranks together will deliver.
        num_ranks: How many ranks deliver about as much as this one, of which alone it hears.
        doing: What is done with them.
        then: What can still take long when all of this rank's are delivered.
        quiet: Whether to show nothing.
    """

    def __init__(
        self,
        total_bytes: int,
        num_ranks: int = 1,
        *,
        doing: str = "writing",
        then: str = "waiting for the disk",
        quiet: bool = False,
    ) -> None:
        self._total, self._num_ranks = total_bytes, num_ranks
        self._doing, self._then = doing, then
        self._done = 0
        self._quiet = quiet or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _TRUE
        self._bar = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        """Show the bar, if there is a terminal to show it on."""
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._doing, total=self._total, unit="B", unit_scale=True, file=sys.stderr, leave=False
            )
        return self

    def __call__(self, num_bytes: int) -> None:
        """Count bytes that this rank has just delivered."""
        before, self._done = self._done, min(self._done + num_bytes * self._num_ranks, self._total)
        if self._bar is not None:
            self._bar.update(self._done - before)
            if self._done == self._total:
                # What follows can take as long: the disk takes the bytes, the slowest rank ends.
                self._bar.set_description(self._then)
        elif not self._quiet and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            done, total = human_bytes(self._done), human_bytes(self._total)
            click.echo(f"{self._doing}: {done} of {total} after {self._last_line - self._started:.0f} s", err=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
