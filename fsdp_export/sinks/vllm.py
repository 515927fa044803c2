"""Weights into running vLLM servers: HTTP for what is to happen, a communicator of NCCL for the bytes."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal

import torch

from ..errors import SinkError, UsageError
from ..transfer.buckets import Bucket, BucketLayout
from ..transfer.nccl import Communicator, new_unique_id
from ..transfer.servers import Pending, address_towards
from .broadcasting import BroadcastSink
from .vllm_control import Control, are_whole
from .vllm_store import IdStore

__all__ = ["VLLM"]

_log = logging.getLogger("fsdp_export")


class VLLM(BroadcastSink):
    """Updates the weights of one or more vLLM servers (0.28 or later) from the first rank. vLLM is not needed here.

    The servers run with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "nccl"}'`. Their workers
    and this process's first rank join one communicator, which is kept, and made anew when a server was restarted, has
    another number of workers, or an update failed.

    A bucket is sent when it is complete, and is all that a worker ever waits for. If an update fails once it has begun,
    the servers are told to give it up; they stay paused, since their weights are then part old and part new, and have a
    version that ends in `-given-up`. The next update that succeeds makes them whole.

    Args:
        urls: Of the servers, `http://host:port`.
        bucket_bytes: Bytes that are sent at a time. The first rank's GPU holds two buckets, each worker one.
        timeout: Seconds to wait for an answer, and for the other side of a transfer.
        pause: What becomes of requests meanwhile: `"keep"` freezes them and goes on with the new weights, `"wait"`
            lets them finish first, `"abort"` ends them. None if the caller pauses and resumes: servers must not
            generate during an update, nor after one that failed.
        flush_cache: Whether to drop what was computed with the old weights: the prefix cache, the cache of encoders,
            and what requests that are kept have computed, which then is computed anew.
        headers: HTTP headers, for example with a key.
        address: This host's address for servers that cannot join by an id (before 0.31); default: the one from
            which the first server is reached.

    Attributes:
        version: What vLLM is to call the weights of the next update; None for the number of the update.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        bucket_bytes: int = 1 << 30,
        timeout: float = 120.0,
        pause: Literal["keep", "wait", "abort"] | None = "keep",
        flush_cache: bool = True,
        headers: Mapping[str, str] | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout=timeout)
        if pause not in {"keep", "wait", "abort", None}:
            raise UsageError("no such way to pause", expected="keep, wait, abort or None", found=pause)
        self.pause, self.flush_cache, self.address = pause, flush_cache, address
        self._control = Control(urls, timeout, headers)
        self._servers = self._control.servers
        self._communicator: Communicator | None = None
        self._num_workers: list[int] = []
        self._chunk_bytes = 0
        self._sent_version = ""
        self._has_started = self._may_resume = False

    def _begin(self, layouts: Sequence[BucketLayout], cards: Sequence[str]) -> str:
        self._has_started = self._may_resume = False
        num_workers, versions = self._control.world_sizes(), self._control.versions()
        if num_workers != self._num_workers or set(versions) != {self._sent_version}:
            self.disconnect()
        self._may_resume = self.pause is not None and are_whole(versions)
        if self.pause is not None:
            self._control.pause(self.pause, clear_cache=self.flush_cache)
        self._control.give_up()
        self._num_workers = num_workers
        return ""

    def _connect(self, layouts: Sequence[BucketLayout], ticket: str) -> None:
        chunk_bytes = max((layout.num_bytes for layout in layouts), default=0)
        if self._communicator is None or chunk_bytes > self._chunk_bytes:
            self.disconnect()
            self._control.leave()
            self._chunk_bytes = chunk_bytes
            self._communicator = self._meet()
        self._has_started = True
        with self._explained():
            self._control.start(self.next_version)

    def _announce(self, bucket: Bucket) -> Pending[Any]:
        return self._control.receive(bucket)

    def _broadcast(self, buffer: torch.Tensor, check: Callable[[], None]) -> None:
        assert self._communicator is not None
        self._communicator.broadcast(buffer, check=check)

    def _commit(self) -> None:
        with self._explained():
            self._control.finish(self.next_version)
            if self.flush_cache:
                self._control.flush()
        self._sent_version = self.next_version
        if self.pause is not None:
            self._control.resume()

    def _cancel(self) -> None:
        if not self.is_lead:
            return
        self.disconnect()
        if not self._has_started:
            if self._may_resume:
                with suppress(SinkError):
                    self._control.resume()
            return
        try:
            self._control.give_up()
        except SinkError as error:
            _log.warning("vLLM may have to be restarted, it cannot be told that an update has failed: %s", error)

    def disconnect(self) -> None:
        """Leave the communicator; the next update makes one anew. To be called on the first rank before it ends."""
        self._sent_version = ""
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator = None

    def _outcome(self) -> str:
        stay = "stay paused" if self.pause is not None else "must not generate"
        return f"The servers {stay} until an update succeeds"

    def _meet(self) -> Communicator:
        """Make a communicator of this process and all workers."""
        try:
            unique_id = self._new_unique_id()
            return self._join(unique_id, {"nccl_unique_id_b64": base64.b64encode(unique_id).decode()})
        except SinkError as error:
            if "nccl_unique_id_b64" not in str(error):
                raise SinkError(self._named(error)) from error
        unique_id = self._new_unique_id()
        address = self.address or address_towards(self._control.servers[0].url)
        with IdStore(unique_id, address, 1 + sum(self._num_workers), self.timeout) as store:
            return self._join(unique_id, {"master_address": address, "master_port": store.port})

    def _join(self, unique_id: bytes, rendezvous: Mapping[str, Any]) -> Communicator:
        layout = {"packed": True, "packed_buffer_size_bytes": self._chunk_bytes, "packed_num_buffers": 1}
        num_ranks = 1 + sum(self._num_workers)
        first_ranks = list(accumulate(self._num_workers, initial=1))[:-1]
        pending = self._control.join(first_ranks, {**rendezvous, "world_size": num_ranks, **layout})
        communicator: Communicator = self._new_communicator(unique_id, num_ranks, pending.check)
        try:
            pending.wait()
        except BaseException:
            communicator.abort()
            raise
        return communicator

    def _new_unique_id(self) -> bytes:
        return new_unique_id()

    def _new_communicator(self, unique_id: bytes, num_ranks: int, check: Callable[[], None]) -> Any:
        device = torch.device("cuda", torch.cuda.current_device())
        communicator = Communicator(unique_id, 0, num_ranks, device, timeout=self.timeout, check=check)
        communicator.warm_up(check)
        return communicator
