"""What the command prints and where, and with which exit code it leaves."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import NoReturn

import click

from .errors import ExportError, RankError

__all__ = ["exit_codes", "leave", "logged", "quiet_libraries", "stdout_kept_for_json"]

_INTERRUPTED = 130
_SILENT_SECONDS = 1.0


def quiet_libraries(*, silent: bool) -> None:
    """Keep what other libraries print from cluttering ours. They read these variables as they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if silent:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def stdout_kept_for_json() -> Iterator[None]:
    """Send to stderr whatever is printed on stdout, also by C++ and by processes that are started."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


class _Handler(logging.Handler):
    """Prints warnings of the library."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one, above a progress bar if there is one."""
        from tqdm import tqdm

        tqdm.write(f"fsdp-export: {record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


@contextmanager
def logged(*, enabled: bool) -> Iterator[None]:
    """Print the library's warnings on stderr, or drop them."""
    handler = _Handler(logging.WARNING) if enabled else logging.NullHandler()
    logger = logging.getLogger("fsdp_export")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def exit_codes(may_speak: Callable[[], bool]) -> Iterator[None]:
    """Turn errors into messages and exit codes; an exception that is none of ours is a bug and keeps its traceback.

    Args:
        may_speak: Asked, once something failed, whether this process says so or another one.
    """
    try:
        yield
    except ExportError as error:
        bug = error.__cause__
        if isinstance(error, RankError) and bug is not None and f"{type(bug).__name__}: {bug}" in str(error):
            traceback.print_exception(type(bug), bug, bug.__traceback__)
        leave(f"fsdp-export: {error}", error.exit_code, may_speak=may_speak())
    except KeyboardInterrupt:
        message = "fsdp-export: interrupted; the old export is intact, or the new one complete"
        leave(message, _INTERRUPTED, may_speak=may_speak())


def leave(message: str, exit_code: int, *, may_speak: bool) -> NoReturn:
    """End this process, with a message if it is the one that speaks."""
    if may_speak:
        click.echo(message, err=True)
    else:
        # torchrun ends all ranks as soon as one has failed, also the one that is about to say why.
        time.sleep(_SILENT_SECONDS)
    sys.exit(exit_code)
