"""A small server with the routes and the states of vLLM, in a process of its own; bytes come over NCCL or gloo."""

from __future__ import annotations

import base64
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from fake_server import FakeServer, Faults, digests_of, serve
from gloo_wire import GlooCommunicator

from fsdp_export.transfer.nccl import Communicator


class FakeVLLM(FakeServer):
    """The server.

    A request can fail by `refuse`, `refuse late` (once the bytes are there), `hide`, `stall` or `die`.

    Args:
        num_workers: How many of them there are.
        devices: Their devices, which decide on the wire; default: the CPU.
        joins_by_id: Whether they know `nccl_unique_id_b64`, as they do since vLLM 0.31.
        timeout: Seconds that a worker waits for bytes; vLLM's would for ever.
    """

    def __init__(
        self, *, num_workers: int = 1, devices: Sequence[str] = (), joins_by_id: bool = True, timeout: float = 60
    ) -> None:
        devices = list(devices or ["cpu"] * num_workers)
        # What has used a GPU cannot be forked, and what was not must not import all again.
        start_method = "fork" if devices[0] == "cpu" else "spawn"
        super().__init__(_serve, devices, joins_by_id, timeout, start_method=start_method)

    @contextmanager
    def restarted(self, num_workers: int = 1) -> Iterator[None]:
        """Run another server at the same place, once the one before has died."""
        devices, *others = self.arguments
        self.arguments = (["cpu"] * num_workers if devices[0] == "cpu" else devices, *others)
        with super().restarted():
            yield


class _Worker:
    def __init__(self, engine: _Engine, index: int, device: str) -> None:
        self.engine, self.index, self.device = engine, index, torch.device(device)
        self.group: Any = None
        self.is_active = False
        self.coming: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def init(self, info: dict[str, Any]) -> None:
        allowed = {"master_address", "master_port", "rank_offset", "world_size"}
        allowed |= {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        allowed |= {"nccl_unique_id_b64"} if self.engine.joins_by_id else set()
        for name in info.keys() - allowed:
            raise ValueError(f"Invalid init_info: __init__() got an unexpected keyword argument {name!r}")
        assert info["packed"]
        if "nccl_unique_id_b64" in info:
            unique_id = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        else:
            store = torch.distributed.TCPStore(info["master_address"], info["master_port"], info["world_size"])
            unique_id = store.get("broadcast_from/0/0")[-132:-4]
        self.chunk_bytes = info["packed_buffer_size_bytes"]
        rank = info["rank_offset"] + self.index
        self.group = self.join(unique_id, rank, info["world_size"])

    def join(self, unique_id: bytes, rank: int, num_ranks: int) -> Any:
        if self.device.type == "cpu":
            return GlooCommunicator(unique_id, rank, num_ranks, timeout=self.engine.timeout)
        group = Communicator(unique_id, rank, num_ranks, self.device, timeout=self.engine.timeout)
        group.warm_up()
        return group

    def start(self) -> None:
        if self.is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.is_active = True

    def update(self, info: dict[str, Any]) -> None:
        if not self.is_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.receive(**info)
        except BaseException:
            self.is_active = False
            raise

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        if self.group is None:
            raise RuntimeError("NCCL weight transfer not initialized.")
        assert names
        dtypes = [getattr(torch, name) for name in dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        assert sum(sizes) <= self.chunk_bytes, "more than one chunk"
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        if len(buffer):
            self.group.broadcast(buffer)
        self.engine.fail_if_asked("update_weights", late=True)
        for name, dtype, shape, part in zip(names, dtypes, shapes, buffer.split(sizes), strict=True):
            # What came before an error is still there, and what comes after it is not taken.
            self.coming.setdefault(name, part.view(dtype).view(shape))

    def finish(self) -> None:
        if not self.is_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.weights |= self.coming
        self.coming = {}
        self.is_active = False

    def shutdown(self) -> None:
        if self.is_active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        if self.group is not None:
            self.group.abort()
        self.group = None


WORKER_CALLS = {
    "init_weight_transfer_engine": "init",
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
    "shutdown_weight_transfer_engine": "shutdown",
}
ANSWERS: dict[str, Callable[[_Engine], Any]] = {
    "get_world_size": lambda engine: {"world_size": len(engine.workers)},
    "weight_info": lambda engine: {"weight_version": engine.version},
    "reset_prefix_cache": lambda _: {"success": True},
    "reset_encoder_cache": lambda _: None,
}


class _Engine:
    def __init__(self, devices: list[str], joins_by_id: bool, timeout: float) -> None:
        self.joins_by_id, self.timeout = joins_by_id, timeout
        self.workers: list[_Worker] = [_Worker(self, index, device) for index, device in enumerate(devices)]
        self.version: str = "default"
        self.is_paused = False
        self.calls: list[str] = []
        self.faults = Faults()
        self.busy = threading.Lock()

    def fail_if_asked(self, route: str, *, late: bool) -> None:
        kind = self.faults.kind_now(route, of=lambda kind: ("late" in kind) is late)
        if not kind:
            return
        if kind == "hide":
            raise LookupError(route)
        if kind == "die":
            os._exit(1)
        if kind == "stall":
            threading.Event().wait()
        raise RuntimeError("CUDA ran out of luck")

    def answer(self, route: str, query: dict[str, str], body: Any) -> Any:
        self.calls.append(" ".join([route, *query.values()]))
        self.fail_if_asked(route, late=False)
        if route in WORKER_CALLS:
            assert self.is_paused
            if not self.joins_by_id and "shutdown" in route:
                raise LookupError(route)
            body = dict(body or {})
            version = body.pop("weight_version", self.version)
            self.on_all(WORKER_CALLS[route], *body.values())
            self.version = version
        elif route in {"pause", "resume"}:
            self.is_paused = route == "pause"
        elif route == "update_weight_version":
            self.version = body["new_version"]
        elif route not in ANSWERS:
            raise LookupError(route)
        return ANSWERS.get(route, lambda _: {"message": "done"})(self)

    def on_all(self, method: str, *arguments: Any) -> None:
        """Ask all workers at once, one call after the other."""
        with self.busy, ThreadPoolExecutor(len(self.workers)) as threads:
            pending = [threads.submit(getattr(worker, method), *arguments) for worker in self.workers]
            for future in pending:
                future.result()

    def state(self) -> dict[str, Any]:
        weights = [digests_of(worker.weights) for worker in self.workers]
        calls, self.calls = self.calls, []
        same = weights[0] if all(each == weights[0] for each in weights) else None
        return {"weights": same, "version": self.version, "paused": self.is_paused, "calls": calls}


def _serve(port: int, devices: list[str], joins_by_id: bool, timeout: float) -> None:
    torch.set_num_threads(1)
    engine = _Engine(devices, joins_by_id, timeout)

    def answer(route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        try:
            return 200, engine.answer(route, query, body)
        except LookupError as error:
            return 404, f"no route {error}"
        except Exception as error:  # noqa: BLE001  as the server does
            return 500, f"{type(error).__name__}: {error}"

    serve(port, answer, engine.faults, engine.state)
