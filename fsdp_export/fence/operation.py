"""One operation as a rank takes part in it: enter, agree, fail, leave."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ..errors import DisagreementError, ExportError, RankError
from . import heartbeat
from .board import Absence, Link, poll
from .heartbeat import Heartbeat
from .verdict import Report, to_error

__all__ = ["Operation", "SharedOperation"]

# How long rank 0 waits, once a rank failed, for one that is alive but busy; that one finds the verdict later.
PATIENCE_SECONDS = 15.0

_VALUE, _END = "value", "end"
_NO_VALUES = (-1, None)


class Operation:
    """What the ranks do together. This class itself serves a rank that is alone."""

    def agree(self, value: str = "") -> list[str]:
        """Meet all ranks.

        Collective: every rank of the fence must call this in the same order.

        Args:
            value: What this rank brings.

        Returns:
            What each rank brought, in order of ranks.

        Raises:
            ExportError: A rank failed or died; the same error on every rank.
        """
        return [value]

    def check(self) -> None:
        """Raise if another rank is known to have failed or died. Free of any traffic, not collective.

        Raises:
            ExportError: What is known of it. Leaving the operation with it turns it into the error of all ranks.
        """

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Poll until something is done, such as work on a device, unless another rank fails. Not collective.

        Args:
            is_done: Called without pause for 0.1 ms, then ever more rarely, at least every millisecond.

        Raises:
            ExportError: As `check` does.
        """

        def attempt(_: float) -> bool | None:
            if is_done():
                return True
            self.check()
            return None

        poll(attempt, longest_pause=1e-3)


class SharedOperation(Operation):
    """An operation of several ranks, as one of them takes part in it."""

    def __init__(self, link: Link, what: str, number: int) -> None:
        self._link = link
        self._board = link.board
        self._index = link.index
        self._what = what
        self._number = number
        self._others = range(1, len(link.roster.ranks))
        self._callers = set(self._others)
        self._roster = link.roster
        self._round = 0
        self._deadline: float | None = None
        self._notice: Report | None = None
        self._verdict: ExportError | None = None
        self._heartbeat = Heartbeat(link.heartbeat_board, number, link.index, [0] if link.index else self._others)

    def enter(self) -> None:
        """Meet all ranks for the first time.

        Raises:
            RankError: A rank did not call in time.
            DisagreementError: The ranks call different things.
        """
        self._heartbeat.start()
        cards = [json.loads(card) for card in self.agree(json.dumps([socket.gethostname(), self._what]))]
        self._roster = self._roster._replace(hosts=[host for host, _ in cards])
        for index, (_, what) in enumerate(cards):
            if what != cards[0][1]:
                self._verdict = DisagreementError(
                    "the ranks call different things",
                    expected=f"{cards[0][1]} as on {self._roster.name([0])}",
                    found=f"{what} on {self._roster.name([index])}",
                )
                raise self._verdict

    def agree(self, value: str = "") -> list[str]:
        """Meet all ranks; see `Operation`."""
        return self._meet(Report(self._index, _VALUE, value))

    def check(self) -> None:
        """Raise if another rank is known to have failed or died; see `Operation`."""
        self._verdict = self._verdict or self._heartbeat.lost
        if self._verdict is not None:
            raise self._verdict
        self._notice = self._heartbeat.failure
        if self._notice is not None:
            raise to_error(*self._roster.verdict([self._notice]))

    def end(self) -> None:
        """Meet all ranks for the last time."""
        self._meet(Report(self._index, _END, ""))

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the others of an exception; raise what all ranks raise or, if it interrupts, the exception itself."""
        report = Report.of(self._index, error)
        if not isinstance(error, Exception):
            with contextlib.suppress(ExportError):
                self._interrupt(report)
            raise error
        is_own = self._verdict is None and self._notice is None
        try:
            if is_own:
                self._board.write("failed", [self._number, report])
            self._meet(report)
        except ExportError as verdict:
            if verdict is not error:
                raise verdict from (error if is_own else None)
        raise error

    def close(self) -> None:
        """Leave the operation: rank 0 after all others."""
        try:
            if self._index == 0:
                with contextlib.suppress(RankError):
                    self._await_others()
        finally:
            self._heartbeat.stop()
        if self._index:
            with contextlib.suppress(RankError):
                self._board.write(f"left/{self._index}", self._number)

    def _interrupt(self, report: Report) -> None:
        """Tell the others without waiting for any of them."""
        self._board.write("failed", [self._number, report])
        if self._index:
            self._report(report)
        else:
            self._deadline = time.monotonic()
            self._meet(report)

    def _meet(self, report: Report) -> list[str]:
        """Bring a report to the next round; return what all ranks brought, or raise the verdict if one failed."""
        if self._verdict is not None:
            raise self._verdict
        report = self._notice or report
        try:
            kind, content = self._obey(report) if self._index else self._judge(report)
        except RankError as lost:
            self._verdict = lost
            raise
        if kind == _VALUE:
            return list(content)
        self._verdict = to_error(kind, str(content))
        raise self._verdict

    def _report(self, report: Report) -> None:
        self._board.write(f"report/{self._index}", [self._number, self._round, report])

    def _obey(self, report: Report) -> Sequence[Any]:
        """Report to rank 0, and return the verdict that it writes."""
        self._report(report)

        def attempt(_: float) -> Sequence[Any] | None:
            number, values, error = self._verdict_in_store()
            if number == self._number and values[0] == self._round:
                return _VALUE, values[1]
            if number == self._number and error is not None:
                return tuple(error)
            if number > self._number:
                return RankError.__name__, f"{self._what} failed on other ranks, which have called another one since"
            return self._roster.verdict(self._heartbeat.dead.values()) if self._heartbeat.dead else None

        verdict = poll(attempt, self._link.longest_pause)
        self._round += 1
        return verdict

    def _judge(self, own: Report) -> Sequence[Any]:
        """As rank 0, hear all ranks and write the verdict."""
        reports = {0: own, **self._hear(is_failing=own.is_error)}
        if self._round == 0:
            self._callers &= set(reports)
        failures = self._failures(reports.values())
        absent = [index for index in self._others if index not in reports]
        verdict: Sequence[Any]
        if failures:
            verdict = self._roster.verdict(failures)
        elif absent:
            verdict = (RankError.__name__, Absence(self._what, self._link).describe(absent))
        else:
            assert len({report.kind for report in reports.values()}) == 1, "some ranks ended where others go on"
            verdict = (_VALUE, [reports[index].text for index in sorted(reports)])
        self._publish(*verdict)
        return verdict

    def _verdict_in_store(self) -> tuple[int, Sequence[Any], Sequence[str] | None]:
        """Return the newest verdict: of which operation, in which round there were values and which, and its error."""
        return self._board.read("verdict") or (0, _NO_VALUES, None)

    def _publish(self, kind: str, content: Any) -> None:
        """Write a verdict. An error leaves the one before it, which a rank may still have to read, where it is."""
        values: Sequence[Any] = (self._round, content)
        error = None
        if kind != _VALUE:
            number, last_values, _ = self._verdict_in_store()
            values, error = last_values if number == self._number else _NO_VALUES, (kind, content)
        self._round += 1
        self._board.write("verdict", [self._number, values, error])

    def _hear(self, *, is_failing: bool) -> dict[int, Report]:
        """Wait for the reports of all other ranks; once one failed, only for those that can still come soon."""
        keys = self._keys("report")
        absence = Absence(self._what, self._link)

        def attempt(waited: float) -> dict[int, Report] | None:
            found = zip(self._others, self._board.read_all(keys), strict=True)
            here = [self._number, self._round]
            reports = {index: Report(*each[2]) for index, each in found if each is not None and each[:2] == here}
            if len(reports) == len(keys):
                return reports
            absent = [index for index in self._others if index not in reports]
            if is_failing or self._heartbeat.failure is not None:
                is_over = self._is_hopeless(absent)
            else:
                is_over = self._round == 0 and absence.is_too_long(waited, lambda: absent)
            return reports if is_over else None

        return poll(attempt, self._link.longest_pause)

    def _is_hopeless(self, absent: Iterable[int]) -> bool:
        """Tell whether none of these ranks will report any more, or not for long."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + PATIENCE_SECONDS
        gone = set(self._heartbeat.dead)
        if self._heartbeat.failure is not None:
            gone.add(self._heartbeat.failure.position)
        left = self._left()
        return now >= self._deadline or all(index in gone or index in left for index in absent)

    def _failures(self, reports: Iterable[Report]) -> list[Report]:
        """Return one report of every rank that failed: rather what it said itself than that it fell silent."""
        failure = self._heartbeat.failure
        known = [*self._heartbeat.dead.values(), *([failure] if failure is not None else []), *reports]
        return list({report.position: report for report in known if report.is_error}.values())

    def _await_others(self) -> None:
        """As rank 0, wait until the others have left."""
        now = time.monotonic()
        # Others learn of a failure with their next beat.
        deadline = max(self._deadline or now + PATIENCE_SECONDS, now + 2 * heartbeat.BEAT_SECONDS)

        def attempt(_: float) -> bool | None:
            awaited = self._callers.difference(self._heartbeat.dead, self._left())
            return True if not awaited or time.monotonic() > deadline else None

        poll(attempt, self._link.longest_pause)

    def _left(self) -> set[int]:
        """Return the ranks that have left this operation."""
        numbers = zip(self._others, self._board.read_all(self._keys("left")), strict=True)
        return {index for index, number in numbers if number is not None and number >= self._number}

    def _keys(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}/{index}" for index in self._others)
