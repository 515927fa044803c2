"""A vLLM server without a GPU: its own routes, worker, transfer engine, reloading and models; only the wire is gloo's.

What vLLM asks of CUDA on the way is answered by stubs, and no kernel is made ready for the weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
from gloo_wire import GlooCommunicator
from ranks import free_port

from fsdp_export.transfer.nccl import UNIQUE_ID_BYTES

from .vllm_models import loaded

TIMEOUT = 20.0


class Server:
    """Starts and stops a server, and asks what it has.

    Args:
        folder: The model that it begins with.
        work: A folder for the weights that it is asked for.
    """

    def __init__(self, folder: Path, work: Path) -> None:
        self.port, self.folder, self.work = free_port(), folder, work
        self.url = f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[Server]:
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(self.folder, self.port))
        process.start()
        try:
            deadline = time.monotonic() + 60
            while not self._is_up():
                assert process.is_alive()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield self
        finally:
            process.kill()
            process.join()

    def save(self, name: str) -> str:
        """Have the server save the parameters of its model, as vLLM has them; return the path."""
        path = str(self.work / name)
        requests.post(self.url + "/test/save", params={"path": path}, timeout=30).raise_for_status()
        return path

    def fail(self, number: int) -> None:
        """Have the model refuse the bucket that comes after so many others."""
        requests.post(self.url + "/test/fail", params={"number": str(number)}, timeout=30).raise_for_status()

    def state(self) -> dict[str, Any]:
        return dict(requests.get(self.url + "/test/state", timeout=30).json())

    def _is_up(self) -> bool:
        try:
            return requests.get(self.url + "/weight_info", timeout=5).ok
        except requests.ConnectionError:
            return False


class Stream:
    """Does what it is told at once."""

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object = None) -> None: ...


def stub_cuda() -> None:
    """Answer what vLLM asks of CUDA while weights come, and join groups over gloo."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    untyped: Any = torch
    accelerator = untyped.accelerator
    accelerator.current_device_index = lambda: 0
    accelerator.current_stream = Stream
    accelerator.synchronize = lambda: None
    untyped.Event = Stream
    untyped.cuda.stream = lambda _: nullcontext()
    untyped.cuda.current_stream = Stream
    untyped.Tensor.record_stream = lambda *_: None
    packed_tensor._get_streams = lambda _, num: tuple(Stream() for _ in range(num))
    nccl_engine.worker_init_process_group = join
    nccl_engine.open_trainer_endpoint = join_as_trainer


def join(init_info: Any, parallel_config: Any) -> GlooCommunicator:
    """Stand in for `worker_init_process_group`."""
    from vllm.distributed.weight_transfer.nccl_common import _worker_group_rank

    unique_id = init_info.nccl_unique_id_bytes or id_of(init_info.master_port)
    rank = _worker_group_rank(init_info.rank_offset, parallel_config)
    return GlooCommunicator(unique_id, rank, init_info.world_size, timeout=TIMEOUT)


def join_as_trainer(init_info: Any) -> GlooCommunicator:
    """Stand in for `trainer_init` of `nccl_common`."""
    return GlooCommunicator(id_of(init_info.master_port), 0, init_info.world_size, timeout=TIMEOUT)


def id_of(port: int) -> bytes:
    return f"/tmp/gloo-of-port-{port}".encode().ljust(UNIQUE_ID_BYTES, b"\0")


class EngineClient:
    """Does what vLLM's `AsyncLLM` does of it, with one worker in this process."""

    def __init__(self, model: Any, config: Any) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.v1.worker.gpu_worker import Worker

        self.vllm_config, self.version, self.is_paused_now = config, "default", False
        self.calls: list[str] = []
        transfer = WeightTransferConfig(backend="nccl")
        engine = WeightTransferEngineFactory.create_engine(transfer, config, torch.device("cpu"), model)
        self.worker = Worker.__new__(Worker)
        self.worker.weight_transfer_engine = engine
        self.worker.vllm_config, self.worker.rank = config, 0
        self.worker._weight_update_active = self.worker._weight_update_is_draft = False
        self.worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        self.thread = ThreadPoolExecutor(1)

    async def on_worker(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        call = getattr(self.worker, method)
        return await asyncio.get_running_loop().run_in_executor(self.thread, call, *arguments)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.on_worker("init_weight_transfer_engine", request.init_info)

    async def shutdown_weight_transfer_engine(self) -> None:
        await self.on_worker("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        await self.on_worker("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self.on_worker("update_weights", request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self.on_worker("finish_weight_update")
        if weight_version is not None:
            self.version = weight_version

    async def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    async def get_weight_version(self) -> str:
        return self.version

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        self.is_paused_now = True

    async def resume_generation(self) -> None:
        self.is_paused_now = False

    async def is_paused(self) -> bool:
        return self.is_paused_now

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_external: bool) -> bool:
        self.calls.append(f"reset_prefix_cache {reset_running_requests}")
        return True

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")


def _serve(folder: Path, port: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from vllm.entrypoints.rl.online.api_router import router
    from vllm.entrypoints.serve.dev.cache.api_router import attach_router
    from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

    torch.set_num_threads(1)
    stub_cuda()
    with loaded(folder) as (model, config):
        for layer in model.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading = lambda _: None
        app = FastAPI()
        app.state.engine_client = EngineClient(model, config)
        app.state.args = SimpleNamespace(log_error_stack=False)
        app.include_router(router)
        attach_router(app)
        app.exception_handler(Exception)(exception_handler)
        _add_test_routes(app, model)
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _add_test_routes(app: Any, model: Any) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    load_weights: Callable[..., Any] = model.load_weights
    left: list[int] = []
    lock = threading.Lock()

    def load(weights: Any) -> Any:
        with lock:
            number = left.pop() if left else None
            if number:
                left.append(number - 1)
        if number == 0:
            raise RuntimeError("the model ran out of luck")
        return load_weights(weights)

    model.load_weights = load

    @app.post("/test/save")
    def save(path: str) -> None:
        torch.save({name: parameter.detach().clone() for name, parameter in model.named_parameters()}, path)

    @app.post("/test/fail")
    def fail(number: int) -> None:
        left[:] = [number]

    @app.get("/test/state")
    def state() -> dict[str, Any]:
        client = app.state.engine_client
        calls, client.calls = client.calls, []
        infos = map(get_layerwise_info, model.modules())
        kept = sum(info.load_numel for info in infos if info.can_load())
        return {"version": client.version, "paused": client.is_paused_now, "calls": calls, "elements_kept": kept}
