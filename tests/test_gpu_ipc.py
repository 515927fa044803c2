"""Updates of workers on the GPUs of the trainer, over CUDA IPC. Run by `bin/test-gpu`, on any number of GPUs.

Beside every rank runs a worker, a process of its own on the same GPU. It is that of checkpoint-engine where this is
installed, and else one that speaks its wire. What stands in for the engine's server is a thread of the first rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_models import large_layers, make, sharded, shared_folder
from torch import nn

from fsdp_export import Exporter
from fsdp_export.errors import ExportError
from fsdp_export.sinks.ipc import IPC

pytest.importorskip("zmq", reason="pyzmq is not installed")

from gpu_ipc_worker import write

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_group")]

folder = pytest.fixture(shared_folder)

MIB = 1 << 20


class Engine:
    """The worker of this rank and, on the first one, the server of all of them. Collective.

    Attributes:
        url: Where the server is.
        what: Whose code the workers run.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.what = root, ""
        self._number, self._rank, self._device = 0, dist.get_rank(), torch.cuda.current_device()
        self._is_closing = False
        self._start()
        self._server = self._serve() if self._rank == 0 else None
        urls = [f"http://127.0.0.1:{self._server.server_port}" if self._server is not None else ""]
        dist.broadcast_object_list(urls, device=torch.device("cuda"))
        self.url = urls[0]
        dist.barrier()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what the worker of this rank has of the latest update."""
        number = len(list(self.root.glob("update-*.json")))
        outcome = json.loads((self.root / f"done-{number}-{self._rank}").read_text())
        self.what = outcome["what"]
        return torch.load(self.root / f"weights-{number}-{self._rank}.pt")

    def close(self) -> None:
        self._is_closing = True
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._worker.kill()
        self._worker.wait()

    def _start(self) -> None:
        ready = self.root / f"ready-{self._rank}"
        ready.unlink(missing_ok=True)
        program = Path(__file__).with_name("gpu_ipc_worker.py")
        self._worker = subprocess.Popen([sys.executable, program, self.root, str(self._rank), str(self._device)])
        threading.Thread(target=self._watch, daemon=True).start()
        while not ready.exists():
            assert self._worker.poll() is None
            time.sleep(0.02)

    def _watch(self) -> None:
        """Say what became of an update whose worker died, and start another one."""
        self._worker.wait()
        if not self._is_closing:
            number = len(list(self.root.glob("update-*.json")))
            write(self.root / f"done-{number}-{self._rank}", {"error": f"the worker of rank {self._rank} died"})
            self._start()

    def _serve(self) -> ThreadingHTTPServer:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
                error = engine._update(body["args"][0]) if self.path == "/collective_rpc" else ""
                data = json.dumps({"success": not error, "error": error}).encode()
                self.send_response(500 if error else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def _update(self, addresses: dict[str, str]) -> str:
        self._number += 1
        write(self.root / f"update-{self._number}.json", addresses)
        paths = [self.root / f"done-{self._number}-{rank}" for rank in range(len(addresses))]
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return "".join(json.loads(path.read_text())["error"] for path in paths)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    running = Engine(folder)
    yield running
    dist.barrier()
    running.close()


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def check_weights(engine: Engine, num_changes: int) -> None:
    """Compare what the worker of this rank has with the model that was changed so often."""
    expected = make()
    for _ in range(num_changes):
        change(expected)
    weights = engine.weights()
    wanted = expected.state_dict()
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, wanted[name]), name


def memory() -> tuple[int, int]:
    """Return what torch holds here, and what is free on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("bucket_bytes", [1, 300_000, 1 << 30])
@pytest.mark.parametrize("kind", ["gpu", "pinned", "some"])
def test_three_updates_bring_the_weights_of_the_time(engine, kind, bucket_bytes):
    model, sink = sharded(kind), IPC(engine.url, engine="vllm", bucket_bytes=bucket_bytes, timeout=30)
    exporter = Exporter(model)
    for number in range(3):
        exporter.send(sink)
        dist.barrier()
        check_weights(engine, number)
        dist.barrier()
        change(model)


def test_three_updates_leave_no_memory(engine):
    exporter = Exporter(sharded("pinned"))
    sink = IPC(engine.url, engine="vllm", bucket_bytes=64 * MIB, timeout=30)
    exporter.send(sink)
    dist.barrier()
    allocated, free = memory()
    dist.barrier()
    for _ in range(3):
        exporter.send(sink)
    dist.barrier()
    allocated_after, free_after = memory()
    assert allocated_after == allocated
    assert abs(free_after - free) < 16 * MIB


@pytest.mark.parametrize("failing", ["worker", "rank"])
def test_a_broken_update_leaves_no_memory_and_the_next_one_succeeds(engine, failing, monkeypatch):
    last = dist.get_world_size() - 1
    exporter = Exporter(sharded("gpu"), bucket_bytes=1)
    sink = IPC(engine.url, engine="vllm", bucket_bytes=1, timeout=30)
    exporter.send(sink)
    dist.barrier()
    allocated, _ = memory()
    if failing == "worker":
        (engine.root / f"fault-{last}").touch()
        message = rf"worker of (rank {last} died|vllm on GPU-\S+ hung up)"
    else:
        message = "out of luck"

        def fail() -> None:
            raise ValueError("out of luck")

        if dist.get_rank() == last:
            monkeypatch.setattr(sink, "_end", fail)
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises((ExportError, ValueError), match=message):
        exporter.send(sink)
    assert time.monotonic() - begin < 15
    monkeypatch.undo()
    assert memory()[0] == allocated
    dist.barrier()
    while not (engine.root / f"ready-{dist.get_rank()}").exists():
        time.sleep(0.02)
    dist.barrier()
    exporter.send(sink)
    dist.barrier()
    check_weights(engine, 0)


@pytest.mark.parametrize("bucket_bytes", [128 * MIB, 512 * MIB])
@pytest.mark.parametrize("kind", ["gpu", "pinned"])
def test_how_fast_an_update_is(engine, kind, bucket_bytes, capsys):
    model = large_layers(kind)
    (engine.root / "discard").touch()
    exporter, sink = Exporter(model), IPC(engine.url, engine="vllm", bucket_bytes=bucket_bytes, timeout=60)
    seconds = []
    for _ in range(4):
        dist.barrier()
        begin = time.perf_counter()
        exporter.send(sink)
        seconds.append(time.perf_counter() - begin)
    walking = []
    for _ in range(4):
        dist.barrier()
        begin = time.perf_counter()
        for _name, _tensor in exporter.tensors():
            pass
        torch.cuda.synchronize()
        walking.append(time.perf_counter() - begin)
    engine.weights()
    if dist.get_rank() == 0:
        num_bytes, fastest = exporter.plan.num_bytes / 1e9, min(seconds[1:])
        with capsys.disabled():
            print(
                f"\nCUDA IPC to {engine.what}, {kind}, {num_bytes:.1f} GB in buckets of {bucket_bytes >> 20} MiB to"
                f" each of {dist.get_world_size()} GPUs: {fastest:.3f} s, {num_bytes / fastest:.0f} GB/s;"
                f" gather alone {min(walking[1:]):.3f} s; first update {seconds[0]:.1f} s"
            )
