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
        self._round = self._oldest_round = 0
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
        # All have left whatever was before.
        self._heartbeat.garbage.extend(self._link.leftovers)
        self._link.leftovers.clear()
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
                self._board.write(self._key("failed"), report)
            self._meet(report)
        except ExportError as verdict:
            if verdict is not error:
                raise verdict from (error if is_own else None)
        raise error

    def close(self) -> None:
        """Leave the operation: rank 0 after all others, and with its keys."""
        have_left = False
        try:
            with contextlib.suppress(RankError):
                have_left = self._index == 0 and self._await_others()
        finally:
            self._heartbeat.stop()
        with contextlib.suppress(RankError):
            if self._index:
                self._board.write(self._key("left", self._index), self._number)
            else:
                self._delete_keys(at_once=have_left)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._number, *parts)))

    def _interrupt(self, report: Report) -> None:
        """Tell the others without waiting for any of them."""
        self._board.write(self._key("failed"), report)
        if self._index:
            self._board.write(self._key(self._round, self._index), report)
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

    def _obey(self, report: Report) -> Sequence[Any]:
        """Report to rank 0, and return the verdict that it writes."""
        self._board.write(self._key(self._round, self._index), report)

        def attempt(_: float) -> Sequence[Any] | None:
            verdict: Sequence[Any] | None = self._board.read(self._key(self._round, "verdict"))
            if verdict is None and self._heartbeat.failure is not None:
                verdict = self._board.read(self._key("verdict"))
            if verdict is None and self._heartbeat.dead:
                verdict = self._roster.verdict(self._heartbeat.dead.values())
            return verdict

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
            self._heartbeat.garbage.extend(self._keys_of_rounds(self._round))
            self._oldest_round = self._round
        key = self._key(self._round, "verdict")
        self._round += 1
        if verdict[0] != _VALUE:
            self._board.write(self._key("verdict"), verdict)
        self._board.write(key, verdict)
        return verdict

    def _hear(self, *, is_failing: bool) -> dict[int, Report]:
        """Wait for the reports of all other ranks; once one failed, only for those that can still come soon."""
        keys = [self._key(self._round, index) for index in self._others]
        absence = Absence(self._what, self._link)

        def absent() -> list[int]:
            return [index for index, key in zip(self._others, keys, strict=True) if self._board.read(key) is None]

        def attempt(waited: float) -> list[Any] | None:
            reports = self._board.read_all(keys)
            if reports is not None:
                return reports
            if is_failing or self._heartbeat.failure is not None:
                is_over = self._is_hopeless(absent())
            else:
                is_over = self._round == 0 and absence.is_too_long(waited, absent)
            return [self._board.read(key) for key in keys] if is_over else None

        reports = zip(self._others, poll(attempt, self._link.longest_pause), strict=True)
        return {index: Report(*report) for index, report in reports if report is not None}

    def _is_hopeless(self, absent: Iterable[int]) -> bool:
        """Tell whether none of these ranks will report any more, or not for long."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + PATIENCE_SECONDS
        gone = set(self._heartbeat.dead)
        if self._heartbeat.failure is not None:
            gone.add(self._heartbeat.failure.position)
        return now >= self._deadline or all(
            index in gone or self._board.read(self._key("left", index)) is not None for index in absent
        )

    def _failures(self, reports: Iterable[Report]) -> list[Report]:
        """Return one report of every rank that failed: rather what it said itself than that it fell silent."""
        failure = self._heartbeat.failure
        known = [*self._heartbeat.dead.values(), *([failure] if failure is not None else []), *reports]
        return list({report.position: report for report in known if report.is_error}.values())

    def _await_others(self) -> bool:
        """As rank 0, wait until the others have left; return whether every rank has."""
        now = time.monotonic()
        # Others learn of a failure with their next beat.
        deadline = max(self._deadline or now + PATIENCE_SECONDS, now + 2 * heartbeat.BEAT_SECONDS)

        def attempt(_: float) -> bool | None:
            keys = [self._key("left", index) for index in self._callers.difference(self._heartbeat.dead)]
            if not keys or self._board.has_all(keys):
                return len(keys) == len(self._others)
            return False if time.monotonic() > deadline else None

        return poll(attempt, self._link.longest_pause)

    def _keys_of_rounds(self, stop: int) -> list[str]:
        rounds = range(self._oldest_round, stop)
        return [self._key(number, name) for number in rounds for name in (*self._others, "verdict")]

    def _delete_keys(self, *, at_once: bool) -> None:
        """Delete what the operation wrote, now or, if a rank can still look for it, in the next operation."""
        keys = [self._key("failed"), self._key("verdict"), self._key("beat", 0)]
        keys += [self._key(name, index) for name in ("beat", "left") for index in self._others]
        keys += self._keys_of_rounds(self._round + 1)
        if at_once:
            self._heartbeat.garbage.extend(keys)
        else:
            self._link.leftovers.extend(keys)
        self._heartbeat.delete_garbage()
