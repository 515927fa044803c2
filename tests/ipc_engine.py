"""An engine with one worker a rank, without GPUs: its workers read memory from files that they and the trainer map."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import zmq

from fsdp_export.memory import bytes_of
from fsdp_export.sinks.ipc import IPC

__all__ = ["Engine", "FileIPC", "Serve", "engine", "serve_minimal"]

Weights = dict[str, torch.Tensor]
Serve = Callable[[str, Callable[[list[tuple[str, torch.Tensor]]], None], Callable[[], None]], None]
"""Takes part in one update: the address, what loads a bucket, what is done at the end."""


def map_file(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


class FileIPC(IPC):
    """Shares files in a folder where `IPC` shares a GPU's memory, and takes ranks for GPUs."""

    def __init__(self, urls: str, folder: Path, **options: Any) -> None:
        super().__init__(urls, **options)
        self.folder = folder

    def _device_key(self) -> str:
        return f"GPU-{dist.get_rank()}"

    def _new_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        path = self.folder / f"memory-{dist.get_rank()}-{self.num_updates}-{time.monotonic_ns()}"
        path.write_bytes(bytes(num_bytes))
        self._share_arguments = (str(path), num_bytes)
        return map_file(*self._share_arguments)

    def _share(self, memory: torch.Tensor) -> Any:
        return map_file, self._share_arguments


def serve_minimal(
    address: str,
    load: Callable[[list[tuple[str, torch.Tensor]]], None],
    finish: Callable[[], None],
    device: int | None = None,
) -> None:
    """Speak the wire as its description says, with no code of checkpoint-engine, on a GPU or none."""
    # What is left for a trainer that is gone, nobody waits for.
    context: Any = zmq.Context.instance()
    with context.socket(zmq.REP) as socket:
        socket.linger = 0
        socket.connect(address)
        function, arguments = _received(socket)
        if device is not None:
            # This process may have another number for the GPU.
            arguments = (*arguments[:6], device, *arguments[7:])
        memory = function(*arguments)
        assert memory.dtype == torch.uint8
        socket.send(b"")
        while (entries := _received(socket)) is not None:
            try:
                assert all(entry["offset"] % 256 == 0 for entry in entries)
                load([(entry["name"], _view(memory, **entry)) for entry in entries])
                if device is not None:
                    torch.cuda.synchronize(device)
            except Exception:  # noqa: BLE001  the trainer is to tell
                socket.send_string(traceback.format_exc())
            else:
                socket.send(b"")
        del memory
        if device is not None:
            torch.cuda.synchronize(device)
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        socket.send(b"")
        assert _received(socket) is None
        finish()
        socket.send(b"")


def _received(socket: zmq.Socket[bytes]) -> Any:
    message = pickle.loads(socket.recv())
    if isinstance(message, Exception):
        raise message
    return message


def _view(memory: torch.Tensor, *, offset: int, shape: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


class Engine:
    """What a trainer sees of vLLM and SGLang; a process for each worker.

    Attributes:
        url: Where it is.
        may_go_on: To be set for a worker that stalls.
        requests: Route and body of every request so far.
        refused: Routes that are answered with HTTP 500 once.
        missing: Routes that it does not have.
        is_idle: Whether it says once that it has all weights, without looking for them.
    """

    def __init__(self, num_workers: int, serve: Serve) -> None:
        self.may_go_on = multiprocessing.get_context("fork").Event()
        self._serve = partial(_be_worker, serve, self.may_go_on.wait)
        self._workers = [_start(self._serve) for _ in range(num_workers)]
        self._spares: dict[int, tuple[Any, Connection]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.refused: set[str] = set()
        self.missing: set[str] = set()
        self.is_idle = False
        self._alone = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def weights(self, worker: int) -> Weights:
        """Return what a worker has loaded and finished."""
        with self._alone:
            pipe = self._workers[worker][1]
            pipe.send("weights")
            return safetensors.torch.load(pipe.recv())

    def set_fault(self, worker: int, fault: str) -> None:
        """Let a worker fail once: `raise`, `stall` or `die` at the second bucket of an update, `finish` at its end."""
        with self._alone:
            self._workers[worker][1].send(("fault", fault))
            if fault == "die":
                # Now, since what serves requests is a thread, and to fork from there can crash.
                self._spares[worker] = _start(self._serve)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for process, pipe in [*self._workers, *self._spares.values()]:
            process.kill()
            process.join()
            pipe.close()

    def routes(self) -> list[str]:
        return [route for route, _ in self.requests]

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        """Do what a route is for, and return status and answer."""
        self.requests.append((route, body))
        name = route.partition("?")[0]
        if name in self.missing:
            return 404, {"detail": "Not Found"}
        if name in self.refused:
            self.refused.remove(name)
            return 500, {"error": "CUDA ran out of luck"}
        if name == "/collective_rpc":
            assert body["method"] == "update_weights_from_ipc"
            error = self._update(body["args"][0])
            return (500, {"error": error}) if error else (200, {"results": [None]})
        if name == "/update_weights_from_ipc":
            error = self._update(body["zmq_handles"])
            return 400 if error else 200, {"success": not error, "message": error}
        return 200, {"success": True}

    def _update(self, addresses: dict[str, str]) -> str:
        if self.is_idle:
            self.is_idle = False
            return ""
        with self._alone:
            for number in range(len(self._workers)):
                self._tell(number, ("update", addresses[f"GPU-{number}"]))
            return "".join(self._outcome(number) for number in range(len(self._workers)))

    def _tell(self, number: int, what: tuple[str, str]) -> None:
        try:
            self._workers[number][1].send(what)
        except ConnectionError:  # it died behind the answer to the update before
            self._replace(number)
            self._workers[number][1].send(what)

    def _replace(self, number: int) -> None:
        process, pipe = self._workers[number]
        process.join()
        pipe.close()
        self._workers[number] = self._spares.pop(number)

    def _outcome(self, number: int) -> str:
        try:
            return self._workers[number][1].recv()
        except (EOFError, ConnectionError):
            self._replace(number)
            return f"worker {number} died"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
                status, answer = engine.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def engine(num_workers: int, serve: Serve = serve_minimal) -> Iterator[Engine]:
    running = Engine(num_workers, serve)
    try:
        yield running
    finally:
        running.close()


def _start(be_worker: Callable[..., None]) -> tuple[Any, Connection]:
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        # As in `run_ranks`.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=be_worker, args=(theirs, ours))
        process.start()
    theirs.close()
    return process, ours


def _be_worker(serve: Serve, stall: Callable[[], object], pipe: Connection, other_end: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    other_end.close()
    current: Weights = {}
    fault = ""
    while True:
        try:
            request = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        if request == "weights":
            pipe.send(safetensors.torch.save(current))
        elif request[0] == "fault":
            fault = request[1]
        else:
            worker = _Worker(fault, stall)
            fault = ""
            try:
                serve(request[1], worker.load, worker.finish)
            except Exception:  # noqa: BLE001  the engine answers with it
                pipe.send(traceback.format_exc())
            else:
                current = worker.finished
                pipe.send("")


class _Worker:
    """One update of one worker."""

    def __init__(self, fault: str, stall: Callable[[], object]) -> None:
        self.fault, self.stall, self.num_buckets = fault, stall, 0
        self.loaded: Weights = {}
        self.finished: Weights = {}

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.num_buckets += 1
        if self.num_buckets == 2:
            self._fail()
        # What overwrites a bucket before it was acknowledged would be seen here.
        copies = {name: tensor.clone() for name, tensor in weights}
        time.sleep(0.002)
        assert all(torch.equal(bytes_of(copies[name]), bytes_of(tensor)) for name, tensor in weights)
        self.loaded |= copies

    def finish(self) -> None:
        if self.fault == "finish":
            raise ValueError("these weights cannot be finished")
        self.finished = self.loaded

    def _fail(self) -> None:
        if self.fault == "raise":
            raise ValueError("no room for these weights")
        if self.fault == "stall":
            self.stall()
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
