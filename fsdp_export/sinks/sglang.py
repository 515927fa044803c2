"""Weights into running SGLang servers: HTTP for what is to happen, a process group of torch for the bytes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..errors import SinkError, UsageError
from ..transfer.buckets import Bucket, BucketLayout
from ..transfer.process_group import SenderGroup
from ..transfer.servers import Pending
from .broadcasting import CAUSE_SECONDS, BroadcastSink
from .sglang_control import Control, Workers

__all__ = ["SGLang"]

_log = logging.getLogger("fsdp_export")


class SGLang(BroadcastSink):
    """Updates the weights of one or more SGLang servers from the first rank. SGLang is not needed here.

    The workers of all servers and this process's first rank join one process group, which is kept, and made anew when
    a server was restarted or an update failed. Servers with data-parallel replicas or pipeline stages are refused.

    SGLang writes weights in place, bucket by bucket. If an update fails after the first one, the servers stay paused:
    their weights are part old and part new, until an update succeeds. If it fails before, they go on as they were.

    Args:
        urls: Of the servers, `http://host:port`.
        bucket_bytes: Bytes that are sent at a time. The first rank's device holds two buckets, each worker one.
        timeout: Seconds to wait for an answer, and for the other side of a transfer.
        pause: What becomes of requests meanwhile: `"retract"` keeps them and computes them anew with the new weights,
            `"in_place"` keeps what they have computed, `"abort"` ends them. With None a server takes each bucket when
            no request is running, and answers with a mixture of weights in between.
        flush_cache: Whether to drop what was computed with the old weights, when all have arrived.
        selector: Which models are updated: `"target"`, the `"draft"` one of speculative decoding, or `"all"`.
        backend: Of the process group: `"nccl"`, or `"gloo"` for tensors in host memory.
        group_name: What the names of process groups begin with.
        address: This host's address for the servers; default: the one from which each of them is reached.
        port: The port on which they find this process; default: a free one.
        headers: HTTP headers, for example with a key.

    Attributes:
        version: What SGLang is to call the weights of the next update; None for the number of the update.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        bucket_bytes: int = 1 << 30,
        timeout: float = 120.0,
        pause: Literal["retract", "in_place", "abort"] | None = "retract",
        flush_cache: bool = True,
        selector: Literal["all", "target", "draft"] = "all",
        backend: Literal["nccl", "gloo"] = "nccl",
        group_name: str = "fsdp_export",
        address: str | None = None,
        port: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout=timeout)
        if pause not in {"retract", "in_place", "abort", None}:
            raise UsageError("no such way to pause", expected="retract, in_place, abort or None", found=pause)
        if pause == "in_place" and flush_cache:
            fix = "Use flush_cache=False, or pause='retract'"
            raise UsageError("requests that are paused in place keep their cache, so it cannot be flushed", fix=fix)
        if selector not in {"all", "target", "draft"}:
            raise UsageError("no such models", expected="all, target or draft", found=selector)
        if backend not in {"nccl", "gloo"}:
            raise UsageError("no such backend", expected="nccl or gloo", found=backend)
        self.pause, self.flush_cache, self.backend = pause, flush_cache, backend
        self.group_name, self.address, self.port = group_name, address, port
        self._control = Control(urls, timeout, headers, selector)
        self._servers = self._control.servers
        self._group: SenderGroup | None = None
        self._workers: list[Workers] = []
        self._is_paused = self._is_mixed = self._in_session = False

    def _begin(self, layouts: Sequence[BucketLayout], cards: Sequence[str]) -> str:
        workers = self._control.workers()
        if self._group is None or workers != self._workers:
            self.disconnect()
            self._workers = workers
            self._meet()
        if self.pause is not None:
            self._is_paused = True
            self._control.pause(self.pause)
        self._in_session = True
        self._control.begin()
        return ""

    def _announce(self, bucket: Bucket) -> Pending[Any]:
        assert self._group is not None
        self._group.require(bucket.buffer.device)
        self._is_mixed = True
        return self._control.receive(bucket, self._group.name)

    def _broadcast(self, buffer: torch.Tensor, check: Callable[[], None]) -> None:
        assert self._group is not None
        self._group.broadcast(buffer, check)

    def _end(self) -> None:
        with self._explained():
            self._control.end()
        self._in_session = False

    def _commit(self) -> None:
        with self._explained():
            if self.flush_cache:
                self._control.flush(0 if self._is_paused else self.timeout / 2)
            self._control.set_version(self.next_version)
            self._is_mixed = False
            if self._is_paused:
                self._control.resume()
        self._is_paused = False

    def _cancel(self) -> None:
        if not self.is_lead:
            return
        name = self._leave_group()
        pause = (self.pause or "retract") if self._is_mixed and not self._is_paused else None
        resume = self._is_paused and not self._is_mixed
        errors = self._control.leave(name, is_session=self._in_session, pause=pause, resume=resume)
        self._in_session, self._is_paused = False, self._is_mixed
        if self._is_mixed:
            _log.warning("%s: weights are part old and part new; paused until an update succeeds", self._control)
        for error in errors:
            _log.warning("a server may have to be restarted, it does not take the end of an update: %s", error)

    def disconnect(self) -> None:
        """Leave the process group; the next update makes one anew. To be called on the first rank before it ends."""
        name = self._leave_group()
        if name:
            self._control.leave(name, is_session=False, pause=None, resume=False)

    def _leave_group(self) -> str:
        """Leave the process group on this side and return its name, which is empty if there was none."""
        group, self._group = self._group, None
        if group is None:
            return ""
        group.abort()
        return group.name

    def _meet(self) -> None:
        """Make a process group of this process and all workers."""
        num_ranks = 1 + sum(number for number, _ in self._workers)
        # Servers may still have one of an earlier name.
        name = f"{self.group_name}-{uuid.uuid4().hex[:12]}"
        self._group = SenderGroup(num_ranks, backend=self.backend, name=name, timeout=self.timeout, port=self.port)
        pending = self._control.join(self._group, self._workers, self.address)
        try:
            self._group.join(pending.check)
        except SinkError:
            pending.check(CAUSE_SECONDS)
            raise
        pending.wait()

    def _outcome(self) -> str | None:
        return "The servers stay paused until an update succeeds" if self._is_mixed else None
