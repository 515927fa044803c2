"""What small servers that stand for engines share: a process of their own, HTTP, faults on request, digests."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import requests
import torch
from ranks import free_port

Engine = Callable[[str, dict[str, str], Any], tuple[int, Any]]
"""Answers a route with its query and body: the HTTP status, and text or JSON. `ConnectionError` hangs up."""


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return dtype, shape and a hash of the bytes of each tensor, as they come out of JSON."""

    def digest(tensor: torch.Tensor) -> list[Any]:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest()]

    return {name: digest(tensor) for name, tensor in tensors.items()}


class FakeServer:
    """Starts and stops the server, and asks it what it has seen.

    Args:
        serve: Calls `serve` in the process; is given the port and `arguments`.
        arguments: All else that it needs; may be changed before a restart.
        start_method: How the process is made.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, start_method: str = "fork") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.serve, self.arguments, self.start_method = serve, arguments, start_method
        self.start()

    def start(self) -> None:
        context: Any = multiprocessing.get_context(self.start_method)
        self.process = context.Process(target=self.serve, args=(self.port, *self.arguments))
        self.process.start()
        self.owner = os.getpid()
        for _ in range(3000):
            if not self.is_down():
                return
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        if self.owner == os.getpid():
            self.process.kill()
            self.process.join()
        else:
            os.kill(self.process.pid or 0, signal.SIGKILL)

    @contextmanager
    def restarted(self) -> Iterator[None]:
        """Run another server at the same place, once the one before has died."""
        while not self.is_down():
            time.sleep(0.02)
        self.start()
        try:
            yield
        finally:
            self.stop()

    def is_down(self) -> bool:
        try:
            requests.get(self.url + "/test/up", timeout=10)
        except requests.ConnectionError:
            return True
        return False

    def state(self) -> dict[str, Any]:
        return dict(requests.get(self.url + "/test/state", timeout=60).json())

    def fail(self, route: str, kind: str, *, after: int = 0) -> None:
        """Have a request fail.

        Args:
            route: Which, without its slash.
            kind: How, one of the server's own words.
            after: How many of them succeed before that.
        """
        requests.post(self.url + "/test/fail", json={"route": route, "kind": kind, "after": after}, timeout=10)


class Faults:
    """What is to fail when, as `FakeServer.fail` asks for it."""

    def __init__(self) -> None:
        self._faults: dict[str, dict[str, Any]] = {}

    def add(self, fault: dict[str, Any]) -> None:
        self._faults[fault["route"]] = fault

    def kind_now(self, route: str, *, of: Callable[[str], bool] = lambda _: True) -> str:
        """Return how a request is to fail, once; empty if it is not, or if its kind is not one of those asked for."""
        fault = self._faults.get(route)
        if fault is None or not of(fault["kind"]):
            return ""
        fault["after"] -= 1
        return str(self._faults.pop(route)["kind"]) if fault["after"] < 0 else ""


def serve(port: int, engine: Engine, faults: Faults, state: Callable[[], Any]) -> None:
    """Serve until the process is killed; `state` is what `FakeServer.state` returns."""

    def answer_of(route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if route == "test/fail":
            faults.add(body)
        if route.startswith("test/"):
            return 200, state() if route == "test/state" else None
        return engine(route, query, body)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            url = urlsplit(self.path)
            try:
                status, answer = answer_of(url.path.strip("/"), dict(parse_qsl(url.query)), body)
            except ConnectionError:
                self.close_connection = True
                return
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(data)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
