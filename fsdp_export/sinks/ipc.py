"""vLLM or SGLang on the GPUs of the trainer: weights go through memory that both see, by checkpoint-engine's wire."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..compat import disown_shared_memory, share_memory
from ..errors import SinkError, UsageError, listing
from ..transfer.buckets import Bucket, BucketLayout, new_buffer
from ..transfer.ipc import WorkerLink
from ..transfer.servers import Pending
from .engine import EngineSink
from .engine_control import EngineControl, EngineKind

__all__ = ["IPC"]

# An engine answers when all its weights are loaded. Whether they ever will be, its workers tell.
_LONGEST_UPDATE_SECONDS = 3600.0
_SECONDS_FOR_AN_ABORT = 5.0

_WHY_NO_WORKER = {
    "vllm": "start vLLM with --worker-extension-cls checkpoint_engine.worker.VllmColocateWorkerExtension",
    "sglang": "install checkpoint-engine beside SGLang",
}


class IPC(EngineSink):
    """Sends the weights to engines whose workers share the GPUs of the trainer: every rank to the worker on its own.

    No bytes leave the GPU. The engine needs checkpoint-engine, of any version, the trainer pyzmq and requests; both
    need to be on one host, with one network namespace. The weights of the engine must be awake.

    Peak device memory: two buckets more than `Exporter` needs; it is given back to the GPU after each update.

    Args:
        urls: The servers, `http://host:port`, one or several.
        engine: What they are.
        bucket_bytes: Bytes that are sent at a time.
        timeout: Seconds to wait for a worker or the engine, each time.
        version: What the engine is to call the next weights; None for the number of the update.
        pause: How requests in progress are paused until the update is over, one of the engine's own words: `"abort"`,
            `"wait"` or `"keep"` of vLLM, `"abort"`, `"retract"` or `"in_place"` of SGLang. None if there are none. An
            engine in which an update was broken off has weights of both, and stays paused until one succeeds.
        flush_cache: Whether what the engine computed with the old weights is forgotten.
        device: The GPU of this rank; default: torch's current one.
        headers: HTTP headers of all requests, for example with a key.

    Raises:
        UsageError: The engine is none of these, there is no server, or something that is needed is not installed.
    """

    align = 256
    sends_everywhere = True

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        engine: EngineKind,
        bucket_bytes: int = 512 << 20,
        timeout: float = 120.0,
        version: str | int | None = None,
        pause: str | None = None,
        flush_cache: bool = True,
        device: torch.device | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout=timeout)
        self._control = EngineControl(
            urls, engine=engine, timeout=timeout, pause=pause, flush_cache=flush_cache, headers=headers
        )
        self.version = version
        self._device = torch.device(device) if device is not None else None
        self._key, self._addresses = "", dict[str, str]()
        self._link: WorkerLink | None = None
        self._memory: torch.Tensor | None = None
        self._handle: Any = None
        self._update: Pending[Any] | None = None

    def card(self) -> str:
        """Return the name of this rank's GPU, under which its worker looks for the address."""
        self._key = self._device_key()
        return self._key

    def _device_key(self) -> str:
        if not torch.cuda.is_available():
            raise UsageError("no GPU to share with an engine", fix="Use a sink that sends over the network")
        if self._device is None or self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"

    def _begin(self, layouts: Sequence[BucketLayout], cards: Sequence[str]) -> str:
        shared = [key for key, count in Counter(cards).items() if count > 1]
        if shared:
            raise UsageError("several ranks on one GPU", found=listing(shared), fix="Call torch.cuda.set_device first")
        # Nobody knows the addresses before: a stranger who binds one would be believed by the worker.
        token = secrets.token_hex(8)
        self._addresses = {key: _address(key, token) for key in cards}
        self._control.pause()
        return token

    def _connect(self, layouts: Sequence[BucketLayout], ticket: str) -> None:
        if not layouts:
            return
        worker = f"the worker of {self._control.engine} on {self._key}"
        self._link = WorkerLink(_address(self._key, ticket), worker=worker, timeout=self.timeout, watch=self._watch)

    def _new_buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return the first, then the second half of the memory that the worker sees."""
        half = -(-max(num_bytes, 1) // self.align) * self.align
        if self._memory is None:
            self._memory = self._new_memory(2 * half, device)
            return self._memory[:half]
        return self._memory[half:]

    def _new_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        if device != self._device:
            fix = "Call torch.cuda.set_device, or give IPC and Exporter the same device"
            raise UsageError("tensors on another GPU than the worker's", expected=self._device, found=device, fix=fix)
        return new_buffer(num_bytes, device)

    def _send(self, bucket: Bucket) -> None:
        assert self._link is not None
        assert self._memory is not None
        if self._handle is None:
            # Every rank has bound its address by now.
            self._call_engine()
            self._link.meet(f"The engine must be on this host; {_WHY_NO_WORKER[self._control.engine]}")
            self._handle = self._share(self._memory)
            self._link.ask(self._handle, "the memory")
        _synchronize(bucket.buffer.device)
        offset = bucket.buffer.storage_offset()
        entries = [
            {
                "name": entry.info.name,
                "dtype": entry.info.dtype,
                "shape": tuple(entry.info.shape),
                "offset": offset + entry.offset,
            }
            for entry in bucket.entries
        ]
        self._link.ask(entries, f"{bucket.entries[0].info.name} and what comes with it")

    def _share(self, memory: torch.Tensor) -> Any:
        return share_memory(memory)

    def _call_engine(self) -> None:
        """Ask the engine to look for the weights; it answers when it has them."""
        if not self.is_lead:
            return
        if self._control.engine == "vllm":
            work: dict[str, Any] = {"method": "update_weights_from_ipc", "args": [self._addresses]}
        else:
            work = {"zmq_handles": self._addresses}
        route = "/update_weights_from_ipc"
        self._update = self._control.update(work, route, self.next_version, _LONGEST_UPDATE_SECONDS)

    def _watch(self) -> bool:
        """Raise what the engine or another rank could not do; tell whether the engine says that it is done."""
        self.check()
        if self._update is None:
            return False
        self._update.check()
        return self._update.is_done()

    def _end(self) -> None:
        if self._link is not None:
            self._link.ask(None, "the end of the weights")
            # The worker may need the memory to finish its weights.
            self._drop_memory()
            self._link.finish()
            self._link = None
            _free_memory()

    def _drop_memory(self) -> None:
        self._memory = self._handle = None
        self._buffers.clear()
        _free_memory()

    def _commit(self) -> None:
        if self._update is not None:
            self._control.result(self._update, self.timeout)
        self._control.finish(self.next_version, is_asked_for=self.version is not None)
        self._control.resume()
        self._update = None

    def _interrupt(self) -> None:
        if self._link is not None:
            self._link.stop()

    def _cancel(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abort("the trainer broke this update off; its own error tells why")
        if self._handle is not None:
            # A worker that is dead or stalled will never say that it has dropped it.
            disown_shared_memory(self._handle)
        self._drop_memory()
        if self.is_lead:
            with suppress(SinkError):
                self._leave_engine()

    def _leave_engine(self) -> None:
        """Wait until the engine has given up, so that the next update finds it free; with old weights it goes on."""
        update, self._update = self._update, None
        if update is None:
            self._control.give_back()
        else:
            self._control.result(update, _SECONDS_FOR_AN_ABORT)


def _address(key: str, token: str) -> str:
    """Return where the worker of a GPU is waited for: an abstract socket, which is gone with its process."""
    return f"ipc://@checkpoint-engine-{key}-{token}.sock"


def _synchronize(device: torch.device) -> None:
    """Wait until the current stream has filled the bucket: another process will read it."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _free_memory() -> None:
    """Give what nobody uses back to the GPU, where the engine needs it."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
