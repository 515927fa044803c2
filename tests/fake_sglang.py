"""A small server with the routes and the states of SGLang, in processes of its own, whose bytes come over gloo."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from fake_server import FakeServer, Faults, digests_of, serve
from torch.distributed import distributed_c10d

CONTEXT = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1
STATUS = {"refuse": 400, "break": 500, "hide": 404}


class FakeSGLang(FakeServer):
    """The server.

    A request can fail by `refuse` (400), `break` (500), `hide` (404), `late` (400, once the bytes are there), `stall`
    or `die`.

    Args:
        num_workers: How many of them there are.
        has_session: Whether it has the session of an update, as SGLang 0.5.23 has.
        info: What else it says of itself.
        timeout: Seconds that a worker waits for bytes.
        device: Where the weights are.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        has_session: bool = True,
        timeout: float = 60,
        device: str = "cpu",
        **info: object,
    ) -> None:
        super().__init__(_serve, num_workers, has_session, timeout, device, info)


class _Worker:
    """What a process with a part of the model does."""

    def __init__(self, index: int, timeout: float, device: str) -> None:
        self.index, self.timeout, self.device = index, timedelta(seconds=timeout), torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def init(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        url, rank = f"tcp://{master_address}:{master_port}", rank_offset + self.index
        store, _, _ = next(dist.rendezvous(url, rank, world_size, timeout=self.timeout))
        torch_private: Any = distributed_c10d
        self.groups[group_name], _ = torch_private._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(group_name, store),
            group_name=group_name,
            timeout=self.timeout,
        )
        torch_private._world.pg_group_ranks[self.groups[group_name]] = {each: each for each in range(world_size)}

    def destroy(self, group_name: str) -> None:
        dist.destroy_process_group(self.groups.pop(group_name))

    def receive(
        self, group_name: str, names: list[str], dtypes: list[str], shapes: list[list[int]], late: bool
    ) -> None:
        tensors = [
            torch.empty(shape, dtype=getattr(torch, name), device="meta")
            for shape, name in zip(shapes, dtypes, strict=True)
        ]
        buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=self.device)
        dist.broadcast(buffer, 0, group=self.groups[group_name])
        assert not late, "CUDA ran out of luck"
        begin = 0
        for name, tensor in zip(names, tensors, strict=True):
            assert begin % tensor.itemsize == 0, f"Unaligned received tensor {name}"
            part = buffer[begin : begin + tensor.nbytes]
            self.weights[name] = part.view(tensor.dtype).view(tensor.shape)
            begin += tensor.nbytes

    def digests(self) -> dict[str, list[Any]]:
        return digests_of({name: value.cpu() for name, value in self.weights.items()})


def _work(commands: Connection, index: int, timeout: float, device: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else ends it when the server is killed
    torch.set_num_threads(1)
    worker = _Worker(index, timeout, device)
    while True:
        method, arguments = commands.recv()
        try:
            commands.send((True, getattr(worker, method)(**arguments)))
        except Exception as error:  # noqa: BLE001  as SGLang does
            commands.send((False, f"{type(error).__name__}: {error}"))


class _RefusedError(Exception):
    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class _Engine:
    def __init__(
        self, num_workers: int, has_session: bool, timeout: float, device: str, info: Mapping[str, object]
    ) -> None:
        self.has_session = has_session
        self.info = {"tp_size": num_workers, "startup_time": {"tokenizer_e2e": time.time()}, **info}
        self.version = "default"
        self.is_paused = self.is_open = False
        self.calls: list[str] = []
        self.loads: list[list[str]] = []
        self.faults = Faults()
        self.busy = threading.Lock()
        self.workers = []
        for index in range(num_workers):
            mine, theirs = CONTEXT.Pipe()
            CONTEXT.Process(target=_work, args=(theirs, index, timeout, device), daemon=True).start()
            theirs.close()
            self.workers.append(mine)

    def on_all(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Have all workers do something, one thing after the other."""
        with self.busy:
            for worker in self.workers:
                worker.send((method, arguments))
            answers = [worker.recv() for worker in self.workers]
        for is_good, message in answers:
            if not is_good:
                raise _RefusedError(message)
        return [answer for _, answer in answers]

    def fault(self, route: str) -> str:
        """Have the fault that was asked for, or return it if its moment comes later."""
        kind = self.faults.kind_now(route)
        if kind == "die":
            os._exit(1)
        if kind == "stall":
            threading.Event().wait()
        if kind in STATUS:
            raise _RefusedError("CUDA ran out of luck", STATUS[kind])
        return kind

    def answer(self, route: str, query: Mapping[str, str], body: dict[str, Any]) -> Any:
        said = ("mode", "selector", "new_version", "timeout")
        self.calls.append(" ".join([route, *(str(value) for key, value in {**body, **query}.items() if key in said)]))
        fault = self.fault(route)
        if route in {"begin_weight_update", "end_weight_update"}:
            self.begin_or_end(is_begin=route == "begin_weight_update")
        elif route == "update_weights_from_distributed":
            self.update(fault, body)
        elif route in {"pause_generation", "continue_generation"}:
            self.is_paused = route == "pause_generation"
        elif route == "init_weights_update_group":
            self.on_all("init", body)
        elif route == "destroy_weights_update_group":
            self.on_all("destroy", body)
        elif route == "update_weight_version":
            assert not body["abort_all_requests"]
            self.version = body["new_version"]
        elif route == "server_info":
            return self.info
        elif route != "flush_cache":
            raise _RefusedError("Not Found", 404)
        return {"success": True, "message": "Success"}

    def begin_or_end(self, *, is_begin: bool) -> None:
        if not self.has_session:
            raise _RefusedError("Not Found", 404)
        if self.is_open is is_begin:
            raise _RefusedError("a weight-update session is already open" if is_begin else "no session is open")
        self.is_open = is_begin

    def update(self, fault: str, body: dict[str, Any]) -> None:
        if self.has_session and not self.is_open:
            raise _RefusedError("must run between begin_weight_update() and end_weight_update()")
        assert body.pop("load_format") == "flattened_bucket"
        assert not body.pop("flush_cache")
        assert body.pop("selector", None) == ("all" if self.has_session else None)
        self.on_all("receive", {**body, "late": fault == "late"})
        self.loads.append(body["names"])

    def state(self) -> dict[str, Any]:
        weights = self.on_all("digests", {})
        calls, self.calls, loads, self.loads = self.calls, [], self.loads, []
        same = weights[0] if all(each == weights[0] for each in weights) else None
        return {
            "weights": same,
            "version": self.version,
            "paused": self.is_paused,
            "open": self.is_open,
            "calls": calls,
            "loads": loads,
        }


def _serve(port: int, *arguments: Any) -> None:
    engine = _Engine(*arguments)

    def answer(route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        try:
            return 200, engine.answer(route, query, body or {})
        except _RefusedError as error:
            return error.status, {"success": False, "message": str(error)}

    serve(port, answer, engine.faults, engine.state)
