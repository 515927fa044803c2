"""Signs of life of the ranks in one operation."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ..errors import RankError
from .board import Board
from .verdict import SILENT, Report

__all__ = ["BEAT_SECONDS", "SILENT_BEATS", "Heartbeat"]

BEAT_SECONDS = 1.0
# Counted in the watcher's own beats: a job that is suspended as a whole and resumed finds nobody dead.
SILENT_BEATS = 10


class Heartbeat(threading.Thread):
    """Shows the others that this rank lives, and watches some of them, during one operation.

    It is no daemon, which could run into a dying interpreter. If the thread that owns the operation ended with the
    program and left it open, the heartbeat tells the other ranks and ends too.

    Args:
        board: A board that no other thread uses.
        number: The number of the operation.
        index: Where this rank stands among the ranks.
        watched: Indices of the ranks that are missed when they stop beating.

    Attributes:
        failure: The first rank that is known to have failed or died.
        lost: The error, if the store is gone.
        dead: What is reported of the watched ranks that stopped beating, by index.
    """

    def __init__(self, board: Board, number: int, index: int, watched: Iterable[int]) -> None:
        super().__init__(name=f"fsdp-export-heartbeat-{number}", daemon=False)
        self.failure: Report | None = None
        self.lost: RankError | None = None
        self.dead: dict[int, Report] = {}
        self._board = board
        self._number = number
        self._index = index
        self._watched = frozenset(watched)
        self._num_beats = 0
        self._seen: dict[int, tuple[object, int]] = {}
        self._owner = threading.current_thread()
        self._is_over = threading.Event()
        self._beat()

    def run(self) -> None:
        """Beat until `stop` is called."""
        try:
            while not self._is_over.wait(BEAT_SECONDS):
                if not self._owner.is_alive() and not threading.main_thread().is_alive():
                    self._post(Report(self._index, RankError.__name__, "the program ended within the export"))
                    return
                self._beat()
                self._watch()
        except RankError as error:
            self.lost = error

    def stop(self) -> None:
        """Stop beating. What the thread wrote is in the store when this returns."""
        self._is_over.set()
        if self.is_alive():
            self.join()

    def _beat(self) -> None:
        self._num_beats += 1
        self._board.write(f"beat/{self._index}", [self._number, self._num_beats])
        # A write has no answer; that of this read says that the beat has arrived.
        failure = self._board.read("failed")
        if self.failure is None and failure is not None and failure[0] == self._number:
            self.failure = Report(*failure[1])

    def _watch(self) -> None:
        for index in self._watched.difference(self.dead):
            beat = self._board.read(f"beat/{index}")
            if index and (beat is None or beat[0] < self._number):
                # It has not called yet; rank 0 has, or there would be no operation.
                continue
            last, silence = self._seen.get(index, (None, 0))
            silence = silence + 1 if beat == last else 0
            self._seen[index] = (beat, silence)
            if silence >= SILENT_BEATS:
                self._miss(index)

    def _miss(self, index: int) -> None:
        seconds = SILENT_BEATS * BEAT_SECONDS
        report = Report(index, SILENT, f"no sign of life for {seconds:g} s, the process died or is stuck")
        if self.failure is None:
            self.failure = report
            self._post(report)
        self.dead[index] = report

    def _post(self, report: Report) -> None:
        self._board.write("failed", [self._number, report])
