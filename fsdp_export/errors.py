"""The errors of fsdp_export.

One tree; every error that a user can cause is a leaf of it, and so is what one rank tells the others:

    ExportError                 exit code 1 of the command
    ├── UsageError              2  a call or an option that cannot work
    ├── NotFoundError           2  no checkpoint, or no tensor, where one was looked for
    ├── SourceError             1  what is to be exported cannot be read or is not understood
    │   └── UnsafeInputError    1  an input names code; nothing of it was run
    ├── PlanError               1  names, shapes or dtypes that no checkpoint can hold
    ├── DisagreementError       1  the ranks do not agree on what is to be exported
    ├── RankError               1  another rank failed, died or never called
    ├── SinkError               1  what was to be written or sent did not arrive
    └── ComparisonError         3  two sets of tensors differ

A message says what is wrong, for which tensor, in which file, what was expected and found, and one way out.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

__all__ = [
    "COPY_AGAIN",
    "ComparisonError",
    "DisagreementError",
    "ExportError",
    "NotFoundError",
    "PlanError",
    "RankError",
    "SinkError",
    "SourceError",
    "UnsafeInputError",
    "UsageError",
    "listing",
    "printable",
    "truncated_file",
    "unreadable_file",
]


COPY_AGAIN = "Copy the file here again, or use another step"
"""The way out of a file that is not what was written."""


class ExportError(Exception):
    """Base of all errors of this package.

    Args:
        what: What is wrong, without a full stop.
        name: Name of the tensor it is about.
        file: File or folder it is about.
        expected: What should have been there.
        found: What was there.
        fix: One way out, a sentence without its full stop.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        name: str | None = None,
        file: str | PathLike[str] | None = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        text = what
        if name is not None:
            text += f" for {name!r}"
        if file is not None:
            text += f" in {file}"
        facts = [f"{word} {value}" for word, value in (("expected", expected), ("found", found)) if value is not None]
        if facts:
            text += ": " + ", ".join(facts)
        if fix is not None:
            text += f". {fix}."
        super().__init__(text)


class UsageError(ExportError):
    """A call or an option that cannot work."""

    exit_code = 2


class NotFoundError(ExportError):
    """No checkpoint, or no tensor, where one was looked for."""

    exit_code = 2


class SourceError(ExportError):
    """What is to be exported cannot be read or is not understood."""


class UnsafeInputError(SourceError):
    """An input names code; nothing of it was run."""


class PlanError(ExportError):
    """Names, shapes or dtypes that no checkpoint can hold."""


class DisagreementError(ExportError):
    """The ranks do not agree on what is to be exported."""


class RankError(ExportError):
    """Another rank failed, died or never called."""


class SinkError(ExportError):
    """What was to be written or sent did not arrive."""


class ComparisonError(ExportError):
    """Two sets of tensors differ."""

    exit_code = 3


def listing(items: Iterable[object], limit: int = 5) -> str:
    """Join items for a message: sorted, at most `limit` of them, then how many more there are."""
    texts = sorted(printable(str(item)) for item in items)
    shown = ", ".join(texts[:limit])
    return shown if len(texts) <= limit else f"{shown} and {len(texts) - limit} more"


def printable(text: str) -> str:
    """Return a text that may come from a file, spelled out where a terminal would not show it as it is."""
    return text if text and text.isprintable() else ascii(text)


def truncated_file(file: str | PathLike[str], num_bytes: int, found: int) -> SourceError:
    """Return the error of a data file that ends before the bytes that are wanted.

    Args:
        file: The file.
        num_bytes: Up to which byte it is wanted.
        found: Where it ends.
    """
    what = "a truncated data file"
    return SourceError(what, file=file, expected=f"{num_bytes:,} bytes", found=f"{found:,}", fix=COPY_AGAIN)


def unreadable_file(file: str | PathLike[str], error: OSError) -> SourceError:
    """Return the error of a data file that the system does not let us read."""
    return SourceError("a data file that cannot be read", file=file, found=error.strerror or error)
