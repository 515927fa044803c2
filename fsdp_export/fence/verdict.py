"""The one error that all ranks raise: what the failed ones report, joined into one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .. import errors
from ..errors import ExportError, RankError

__all__ = ["SILENT", "Report", "Roster", "to_error"]

SILENT = "silent"

_LEAVES = {
    name: leaf for name, leaf in vars(errors).items() if isinstance(leaf, type) and issubclass(leaf, ExportError)
}
_KINDS: dict[str, type[ExportError]] = {**_LEAVES, SILENT: RankError}


class Report(NamedTuple):
    """What a rank brings to a meeting, or what is known of a rank that failed.

    Attributes:
        position: Where the rank that it is about stands among the ranks.
        kind: The name of an error of this package, `SILENT`, or any other word for a value.
        text: The message of the error, or the value.
    """

    position: int
    kind: str
    text: str

    @classmethod
    def of(cls, position: int, error: BaseException) -> Report:
        """Return what a rank reports of an exception."""
        if isinstance(error, ExportError):
            kind = next(leaf.__name__ for leaf in type(error).__mro__ if leaf in _LEAVES.values())
            return cls(position, kind, str(error))
        if isinstance(error, GeneratorExit):
            return cls(position, RankError.__name__, "stopped early")
        if isinstance(error, Exception):
            return cls(position, RankError.__name__, f"{type(error).__name__}: {error}")
        return cls(position, RankError.__name__, f"interrupted by {type(error).__name__}")

    @property
    def is_error(self) -> bool:
        """Whether the rank failed."""
        return self.kind in _KINDS


class Roster(NamedTuple):
    """The ranks that export together.

    Attributes:
        ranks: Their global ranks, in order.
        hosts: Their hosts in the same order; empty until they are known.
    """

    ranks: Sequence[int]
    hosts: Sequence[str] = ()

    def name(self, positions: Iterable[int]) -> str:
        """Name some of the ranks: `rank 2 (host-b)`, or `ranks 1, 2 (hosts host-a, host-b)`."""
        positions = list(positions)
        text = ("ranks " if len(positions) > 1 else "rank ") + _some([self.ranks[position] for position in positions])
        if not self.hosts:
            return text
        hosts = list(dict.fromkeys(self.hosts[position] for position in positions))
        label = "" if len(positions) == 1 else "host " if len(hosts) == 1 else "hosts "
        return f"{text} ({label}{_some(hosts)})"

    def verdict(self, reports: Iterable[Report]) -> tuple[str, str]:
        """Join the reports of all ranks that failed.

        A rank that died comes first, because others fail of it; then the order of ranks counts. No rank is named
        where all of them say the same.

        Returns:
            The kind of error that all ranks raise, and its message.
        """
        ordered = sorted(reports, key=lambda report: (report.kind != SILENT, report.position))
        _, kind, text = ordered[0]
        same = [report.position for report in ordered if (report.kind, report.text) == (kind, text)]
        if len(same) == len(self.ranks):
            return kind, text
        others = len(ordered) - len(same)
        rest = f" (and {others} more rank{'s' if others > 1 else ''} failed)" if others else ""
        return kind, f"{self.name(same)}: {text}{rest}"


def to_error(kind: str, text: str) -> ExportError:
    """Return the error that a verdict stands for."""
    return _KINDS[kind](text)


def _some(items: Sequence[object], limit: int = 5) -> str:
    """Join items in their order: at most `limit` of them, then how many more there are."""
    shown = ", ".join(map(str, items[:limit]))
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
