"""What sinks for inference engines share: buckets of whole tensors, each sent while the next one is filled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ..errors import UsageError
from ..plan import Plan
from ..steps import Piece
from ..transfer.buckets import Bucket, BucketLayout, Packer, lay_out, new_buffer
from .base import Delivery, Sink

__all__ = ["EngineSink"]

_CHECK_SECONDS = 0.1


class EngineSink(Sink):
    """Sends the weights to an engine, bucket by bucket; a subclass knows the engine.

    The first rank sends, or with `sends_everywhere` every rank. A thread of its own does that, so that tensors are
    gathered and packed meanwhile; two buckets are held, and a slow engine is waited for. A subclass overrides, in the
    order of the calls::

        _begin      first rank                  begin an update; may return a ticket that `_connect` gets on all ranks
        _connect    ranks that send             get ready to send
        _send       ranks that send, a thread   send a bucket, and return when its memory is free
        _end        ranks that send             all buckets are sent: end the transfer
        _commit     first rank                  make the weights current
        _interrupt  ranks that send             make a `_send` that waits end soon; any thread, must not raise
        _cancel     every rank                  instead of what was left of the above, once no `_send` runs; after an
                                                error at any time, also before `_begin` or after `_commit`

    Every wait in these must end in time. Whoever raises in one of them ends the update on all ranks.

    Args:
        bucket_bytes: Bytes that are sent at a time. Tensors of one module that come one after the other are sent
            together even if they are more.
        timeout: Seconds to wait for the engine, each time.

    Attributes:
        version: What the engine is to call the weights of the next update; None for the number of the update.
        num_updates: How many updates this sink has committed.
        is_lead: Whether this is the first rank, from `begin` to the end of an update.
        align: In a bucket tensors begin at multiples of this many bytes.
    """

    delivery: Delivery = "everyone"
    align: int = 1
    sends_everywhere: bool = False

    def __init__(self, *, bucket_bytes: int, timeout: float) -> None:
        if bucket_bytes <= 0:
            raise UsageError("a bucket of no size", expected="a positive number of bytes", found=bucket_bytes)
        if timeout <= 0:
            raise UsageError("no time to wait for an engine", expected="a positive number of seconds", found=timeout)
        self.bucket_bytes, self.timeout = bucket_bytes, timeout
        self.version: str | int | None = None
        self.num_updates = 0
        self.is_lead = self._has_failed = False
        self._packer: Packer | None = None
        self._buffers: list[torch.Tensor] = []
        self._buffer_bytes = 0
        self._sending: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def next_version(self) -> str:
        """What the engine is told to call the weights."""
        return str(self.version if self.version is not None else self.num_updates + 1)

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """Begin an update of the engine."""
        self.is_lead = True
        return self._begin(self._lay_out(plan), cards)

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Get ready to send, on the ranks that do."""
        self._has_failed = False
        if not (self.is_lead or self.sends_everywhere):
            return
        layouts = self._lay_out(plan)
        self._buffer_bytes = max((layout.num_bytes for layout in layouts), default=0)
        self._packer = Packer(layouts, self._free_buffer)
        self._thread = ThreadPoolExecutor(1, "fsdp-export-send")
        self._connect(layouts, ticket)

    def write(self, piece: Piece) -> None:
        """Copy a tensor into the bucket that is filled."""
        if self._packer is None or self._thread is None:
            return
        if self._sending and self._sending[0].done():
            self._await_oldest()
        bucket = self._packer.add(piece.info, piece.tensor)
        if bucket is not None:
            filled = _recorded(bucket.buffer.device)
            self._sending.append(self._thread.submit(self._send_filled, bucket, filled))

    def close(self) -> None:
        """Wait until all buckets are sent."""
        if self._packer is not None:
            while self._sending:
                self._await_oldest()
            self._end()
            self._release()

    def commit(self) -> None:
        """Make the weights current."""
        self._commit()
        self.num_updates += 1
        self.is_lead = False

    def abort(self) -> None:
        """Stop sending, and tell the engine."""
        if self._packer is not None:
            with suppress(Exception):
                self._interrupt()
        self._release()
        with suppress(Exception):
            self._cancel()
        self.is_lead = False

    def _lay_out(self, plan: Plan) -> list[BucketLayout]:
        return lay_out(plan.outputs, self.bucket_bytes, align=self.align)

    def _free_buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return the one of two buffers that is not being sent."""
        while len(self._sending) > 1:
            self._await_oldest()
        if len(self._buffers) < 2:  # noqa: PLR2004  one is filled, one is sent
            self._buffers.append(self._new_buffer(self._buffer_bytes, device))
        else:
            self._buffers.reverse()
        return self._buffers[-1]

    def _await_oldest(self) -> None:
        """Wait until the oldest bucket is sent, or another rank has failed: the engine may wait for that one, too."""
        sent = self._sending.popleft()
        while wait([sent], _CHECK_SECONDS).not_done:
            self.check()
        sent.result()

    def _send_filled(self, bucket: Bucket, filled: Any) -> None:
        if self._has_failed:
            return
        try:
            with _side_stream(bucket.buffer.device, filled):
                self._send(bucket)
        except BaseException:
            self._has_failed = True
            raise

    def _release(self) -> None:
        self._has_failed = True  # what is still queued is not sent
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._packer = None
        self._sending.clear()
        self._buffers.clear()

    def _new_buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return new_buffer(num_bytes, device)

    def _begin(self, layouts: Sequence[BucketLayout], cards: Sequence[str]) -> str:
        return ""

    def _connect(self, layouts: Sequence[BucketLayout], ticket: str) -> None: ...

    def _send(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def _end(self) -> None: ...

    def _commit(self) -> None: ...

    def _interrupt(self) -> None: ...

    def _cancel(self) -> None: ...


def _recorded(device: torch.device) -> Any:
    """Return an event of all that is queued on a device's current stream, whichever device is the current one."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()


def _side_stream(device: torch.device, filled: Any) -> Any:
    """Enter a stream of its own on which a bucket is full."""
    if filled is None:
        return nullcontext()
    stream = torch.get_device_module(device).Stream(device)
    stream.wait_event(filled)
    return stream
