"""What sinks share whose engines are told over HTTP of each bucket, and get its bytes by one broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import SinkError
from ..plan import Plan
from ..transfer.buckets import Bucket
from ..transfer.servers import Pending, Server
from .engine import EngineSink

__all__ = ["CAUSE_SECONDS", "BroadcastSink"]

# For a bucket that is under way when the update fails elsewhere; and for what a server has to say of a transfer.
_GRACE_SECONDS = 5.0
CAUSE_SECONDS = 0.5


class BroadcastSink(EngineSink):
    """Sends from the first rank: every bucket is announced to all servers, whose workers then take it together.

    A bucket is sent when it is complete, and is all that a worker ever waits for. A subclass overrides, beside what
    `EngineSink` names::

        _announce   tell the servers of a bucket; answered once they have loaded it
        _broadcast  send its bytes; calls `check` while it waits, which may raise
        _outcome    what an error is to say of the servers, for one of an update under way
    """

    _servers: Sequence[Server]
    _last_moment = float("inf")

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """As `EngineSink.begin`; what became of the update before is forgotten."""
        self._last_moment = float("inf")
        return super().begin(plan, cards)

    def _send(self, bucket: Bucket) -> None:
        with self._explained():
            pending = self._announce(bucket)

            def check() -> None:
                pending.check()
                self._check_moment()

            try:
                self._broadcast(bucket.buffer, check)
            except SinkError:
                pending.check(CAUSE_SECONDS)  # what a server says of it is worth more
                raise
            pending.wait(self._check_moment)

    def _interrupt(self) -> None:
        # A bucket that is under way is better sent: whoever waits for it on the other side can do nothing else.
        self._last_moment = time.monotonic() + _GRACE_SECONDS

    def _check_moment(self) -> None:
        if time.monotonic() > self._last_moment:
            raise SinkError(f"{self._names} did not take a bucket when the update failed elsewhere")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in errors of an update under way what has become of the servers."""
        try:
            yield
        except SinkError as error:
            raise SinkError(self._named(error), fix=self._outcome()) from error

    def _named(self, error: SinkError) -> str:
        """Return what an error says, with the servers if it says nothing of them."""
        text = str(error).rstrip(".")
        return text if any(server.url in text for server in self._servers) else f"{self._names}: {text}"

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._servers))

    def _announce(self, bucket: Bucket) -> Pending[Any]:
        raise NotImplementedError

    def _broadcast(self, buffer: torch.Tensor, check: Callable[[], None]) -> None:
        raise NotImplementedError

    def _outcome(self) -> str | None:
        raise NotImplementedError
