"""What connects one rank with the others: keys of a store, polled and never waited for inside the store."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch.distributed.distributed_c10d import Store

from ..compat import connect, has_multi_get
from ..errors import RankError
from .file_store import log_of
from .verdict import Roster

__all__ = ["Absence", "Board", "Link", "Turn", "poll"]

WARNING_SECONDS = 5.0

_SPIN_SECONDS = 100e-6
_PAUSE, _BACKGROUND_PAUSE = 10e-3, 100e-3
_ABSENT = "\0"
_T = TypeVar("_T")

_logger = logging.getLogger("fsdp_export")


def poll(attempt: Callable[[float], _T | None], longest_pause: float = _PAUSE) -> _T:
    """Call a function until it returns something: at first without pause, then ever more rarely.

    Args:
        attempt: Is given the seconds since the first call; returns None to be called again.
        longest_pause: Seconds.

    Returns:
        What `attempt` returned.
    """
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        result = attempt(waited)
        if result is not None:
            return result
        if waited > _SPIN_SECONDS:
            # What lasts is overslept by an eighth: most waits are for a gather of a millisecond.
            time.sleep(min(waited / 8, longest_pause))


class Board:
    """Keys of a store with JSON values, written and read without ever waiting for one.

    Every method raises `RankError` when the process that hosts the store is gone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = log_of(store)
        self._has_multi_get = has_multi_get(store)
        self._existing: set[tuple[str, ...]] = set()

    def write(self, key: str, value: object) -> None:
        """Set a key."""
        self._ask(self._store.set, key, json.dumps(value))

    def read(self, key: str) -> Any | None:
        """Return the value of a key, or None if it does not exist."""
        # compare_set with a value that no key has only reads, in one round trip; `check` and `get` take three.
        value = self._ask(self._store.compare_set, key, _ABSENT, _ABSENT)
        return None if value in {b"", _ABSENT.encode()} else json.loads(value)

    def read_all(self, keys: tuple[str, ...]) -> list[Any | None]:
        """Return the values of keys, None for those that do not exist."""
        if not self._has_multi_get or len(keys) < 2:  # noqa: PLR2004  one key is read as fast by itself
            return [self.read(key) for key in keys]
        # `multi_get` waits for keys that do not exist; one that does stays.
        if keys not in self._existing:
            if not self.has_all(keys):
                return [self.read(key) for key in keys]
            self._existing.add(keys)
        return [json.loads(value) for value in self._ask(self._store.multi_get, list(keys))]

    def has_all(self, keys: Sequence[str]) -> bool:
        """Tell whether all of the keys exist."""
        return self._ask(self._store.check, list(keys))

    def _ask(self, request: Callable[..., _T], *args: object) -> _T:
        if self._log is not None:
            self._log.mend()
        try:
            return request(*args)
        except RuntimeError as error:
            raise RankError(
                "the connection to the store of the process group broke: "
                "the process that hosts it, rank 0 or the launcher, is gone"
            ) from error


class Turn:
    """Whether somebody is within an operation of some ranks; what all fences of these share."""

    is_taken = False


class _Line(NamedTuple):
    """What connects this rank with certain others: two boards for the same keys, so that no beat waits for a report."""

    board: Board
    heartbeat_board: Board
    turn: Turn


# Kept as long as the store: to connect anew to one whose host died takes torch 300 s, what is connected knows at once.
_lines: WeakKeyDictionary[Store, dict[tuple[str, int], _Line]] = WeakKeyDictionary()


def _line(store: Store, prefix: str, index: int) -> _Line:
    lines = _lines.setdefault(store, {})
    if (prefix, index) not in lines:
        Board(store).has_all([prefix])
        lines[prefix, index] = _Line(Board(connect(store, prefix)), Board(connect(store, prefix)), Turn())
    return lines[prefix, index]


class Link:
    """What connects this rank with the others, from one operation to the next."""

    def __init__(
        self, ranks: Sequence[int], index: int, store: Store, timeout: float, *, is_background: bool = False
    ) -> None:
        prefix = f"fsdp_export/{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
        prefix += "/background" if is_background else ""
        self.roster = Roster(tuple(ranks))
        self.index = index
        self.timeout = timeout
        self.longest_pause = _BACKGROUND_PAUSE if is_background else _PAUSE
        # Where rank 0 hosts it, it ends with the last reference there, whatever is still connected.
        self._kept_store = store if is_background else None
        self.board, self.heartbeat_board, self.turn = _line(store, prefix, index)

    def next_number(self, what: str) -> int:
        """Return the number of the next operation; every rank but rank 0 waits until there is one.

        Raises:
            RankError: Rank 0 did not call in time.
        """
        if self.index == 0:
            number = int(self.board.read("number") or 0) + 1
            self.board.write("number", number)
            return number
        last = int(self.board.read(f"last/{self.index}") or 0)
        absence = Absence(what, self)

        def attempt(waited: float) -> int | None:
            number = int(self.board.read("number") or 0)
            if number > last:
                return number
            if absence.is_too_long(waited, lambda: [0]):
                raise RankError(absence.describe([0]))
            return None

        number = poll(attempt, self.longest_pause)
        self.board.write(f"last/{self.index}", number)
        return number


class Absence:
    """Waiting for ranks that have not called: a warning first, then the end of it."""

    def __init__(self, what: str, link: Link) -> None:
        self._what = what
        self._link = link
        self._is_warned = False

    def is_too_long(self, waited: float, absent: Callable[[], Iterable[int]]) -> bool:
        """Tell whether to give up; log once whom this rank waits for."""
        if waited > WARNING_SECONDS and not self._is_warned:
            self._is_warned = True
            names = self._link.roster.name(absent())
            _logger.warning("%s waits for %s to call it too", self._what, names)
        return waited > self._link.timeout

    def describe(self, absent: Iterable[int]) -> str:
        """Return the message about ranks that have not called in time."""
        names = self._link.roster.name(absent)
        return f"{self._what} must be called on every rank, but {names} did not call it within {self._link.timeout:g} s"
