"""Stands in for NCCL where there is no GPU: the same few calls over gloo, between processes started by themselves."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_export.errors import SinkError
from fsdp_export.sinks.vllm import VLLM
from fsdp_export.transfer.nccl import UNIQUE_ID_BYTES

_left: list[Any] = []
"""Kept, since whoever lets go of a group of gloo waits for what is under way; an abort of NCCL does not."""


def new_unique_id() -> bytes:
    """Return the path of a file that all ranks see."""
    return tempfile.mktemp(prefix="gloo-").encode().ljust(UNIQUE_ID_BYTES, b"\0")


class GlooCommunicator:
    """What `Communicator` is for GPUs."""

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        num_ranks: int,
        *,
        timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout, self.device = timeout, torch.device("cpu")
        self._group: Any = None
        self._error: Exception | None = None
        gloo: Any = dist.ProcessGroupGloo
        path = unique_id.rstrip(b"\0").decode()
        self._path = Path(path)

        def meet() -> None:
            try:
                options = gloo._Options()
                options._timeout = timedelta(seconds=timeout)
                options._devices = [gloo.create_device(hostname="127.0.0.1")]
                store = dist.FileStore(path, num_ranks)
                store.set_timeout(timedelta(seconds=timeout))
                self._group = gloo(store, rank, num_ranks, options)
            except Exception as error:  # noqa: BLE001  whoever waits raises it
                self._error = error

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        try:
            self._poll(lambda: not thread.is_alive(), check)
        except BaseException:
            self.abort()
            raise
        if self._error is not None:
            self.abort()
            raise SinkError(f"no group: {self._error}")

    def broadcast(self, buffer: torch.Tensor, src: int = 0, stream: Any = None, *, check: Any = lambda: None) -> None:
        """Send, or receive. Takes what vLLM's communicator takes, and what ours does."""
        if self._group is None:
            raise SinkError("aborted")
        self._path.unlink(missing_ok=True)  # all have met
        options = dist.BroadcastOptions()
        options.rootRank = src
        work = self._group.broadcast([buffer], options)
        self._poll(work.is_completed, check)
        try:
            work.wait()
        except RuntimeError as error:
            raise SinkError(f"broadcast failed: {error}") from error

    def abort(self) -> None:
        _left.append(self._group)
        self._group = None
        self._path.unlink(missing_ok=True)

    destroy = abort

    def _poll(self, is_done: Callable[[], bool], check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.timeout
        while not is_done():
            check()
            if time.monotonic() > deadline:
                self.abort()
                raise SinkError(f"gloo took more than {self.timeout} s")
            time.sleep(0.0002)


class OverGloo(VLLM):
    """The sink as it is, but for the wire."""

    def _new_unique_id(self) -> bytes:
        return new_unique_id()

    def _new_communicator(self, unique_id: bytes, num_ranks: int, check: Callable[[], None]) -> Any:
        return GlooCommunicator(unique_id, 0, num_ranks, timeout=self.timeout, check=check)
