"""SGLang's own HTTP routes, control of updates and updater of weights, around a module on the CPU.

Of SGLang are: the FastAPI application with its requests, what it asks of the scheduler and how it pauses, the session
of an update, the process group, the receiving and unpacking of weights. Not of it: the queue between the two, the
module, and whether its cache is flushed.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import MethodType, SimpleNamespace
from typing import Any

import requests
import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1
PARALLEL = SimpleNamespace(
    dp_size=1, num_dp_ranks=1, tp_rank=0, tp_size=1, pp_size=1, tp_group=SimpleNamespace(cpu_group=None)
)
SERVER_ARGS = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False, "weight_cache_mode": "off"}


def define_operators_of_torchvision() -> None:
    """Describe the operators that are built for CUDA: nothing calls them, but the import of torchvision does that."""
    if not torch.version.cuda:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Server:
    """SGLang around a module, in a process of its own, which is started again when it dies.

    Args:
        make_module: Makes it, in that process. It has `load_weights(named_tensors)`.
        answers: What a request to `/test/NAME` calls with the module.
    """

    def __init__(self, make_module: Callable[[], Any], **answers: Callable[[Any], Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = FORK.Process(target=_keep_alive, args=(port, make_module, answers))
        self.process.start()
        self.wait()

    def wait(self) -> None:
        """Wait until it answers."""
        for _ in range(600):
            with suppress(requests.ConnectionError):
                return requests.get(self.url + "/ping", timeout=10).close()
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        """Kill it; another one is started, which has nothing."""
        os.kill(self.ask("pid"), signal.SIGKILL)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def ask(self, name: str) -> Any:
        answer = requests.get(f"{self.url}/test/{name}", timeout=20)
        answer.raise_for_status()
        return answer.json()


def _keep_alive(*arguments: Any) -> None:
    while True:
        process = FORK.Process(target=_serve, args=arguments)
        process.start()
        process.join()


def _serve(port: int, make_module: Callable[[], Any], answers: dict[str, Callable[[Any], Any]]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else ends it
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import uvicorn
    from sglang.srt.entrypoints import http_server

    logging.disable(logging.WARNING)
    folder = tempfile.mkdtemp()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    module = make_module()
    manager = _manager(_scheduler(module))
    http_server.set_global_state(http_server._GlobalState(manager, None, {}))
    http_server.build_server_info = lambda arguments, _: dict(arguments)
    http_server.redact_watermark_secrets = lambda info: info
    for name, answer in answers.items():
        http_server.app.get(f"/test/{name}")(lambda answer=answer: answer(module))
    http_server.app.get("/test/pid")(os.getpid)
    http_server.app.get("/test/state")(
        lambda: {"paused": manager.is_pause, "version": manager.version, "open": manager.scheduler._session is not None}
    )
    uvicorn.run(http_server.app, host="127.0.0.1", port=port, lifespan="off", log_level="critical")


def _scheduler(module: Any) -> Any:
    """Return SGLang's control of updates over SGLang's updater over the module."""
    from sglang.srt.managers.scheduler_components import weight_updater as control
    from sglang.srt.model_executor.model_runner_components import weight_updater as updates

    for place in (control, updates):
        place.get_parallel = lambda: PARALLEL
        place.get_model = lambda: SimpleNamespace(weight_cache_mode="off")
    updater = updates.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: module,
        update_model_fields=lambda *_: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    runner = SimpleNamespace(weight_updater=updater)
    worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.utils import MultiprocessingSerializer

    for name in ("init_weights_update_group", "destroy_weights_update_group"):
        setattr(worker, name, MethodType(getattr(BaseTpWorker, name), worker))
    worker.deserialize_own_rank = lambda parts: MultiprocessingSerializer.deserialize(parts[0])
    return control.SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
    )


class _Adapters:
    """What the scheduler has of adapters: read by SGLang's own LoRAConfig, each name once."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}

    def answer(self, request: Any) -> Any:
        from sglang.srt.lora.lora_config import LoRAConfig
        from sglang.srt.managers import io_struct

        message = ""
        if isinstance(request, io_struct.UnloadLoRAAdapterReqInput):
            del self.loaded[request.lora_name]
        elif request.lora_name in self.loaded:
            message = f"Failed to load LoRA adapter {request.lora_name} because it is already loaded"
        else:
            config = LoRAConfig(request.lora_path, base_vocab_size=67)
            self.loaded[request.lora_name] = f"{request.lora_path} {config.r}"
        return io_struct.LoRAUpdateOutput(success=not message, error_message=message, loaded_adapters=dict(self.loaded))


def _manager(scheduler: Any) -> Any:
    """Return SGLang's side of the routes, whose requests a thread brings to the scheduler, one after the other."""
    from sglang.srt.lora.lora_registry import LoRARegistry
    from sglang.srt.managers import io_struct, tokenizer_control_mixin, tokenizer_manager
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.utils.aio_rwlock import RWLock

    tokenizer_control_mixin.get_parallel = lambda: PARALLEL
    tokenizer_control_mixin.get_lora = lambda: SimpleNamespace(enable_lora=True, max_loaded_loras=None)
    real = tokenizer_manager.TokenizerManager

    class Manager(tokenizer_control_mixin.TokenizerControlMixin):
        pause_generation, continue_generation = real.pause_generation, real.continue_generation

        def __init__(self) -> None:
            self.scheduler, self.version = scheduler, "default"
            self.server_args = SERVER_ARGS
            self.startup_time = {"tokenizer_e2e": time.time()}
            self.mm_processor = None
            self.is_pause, self.is_pause_cond = False, asyncio.Condition()
            self.model_update_lock = RWLock()
            self.busy = threading.Lock()
            self.lora_update_lock, self.lora_registry = asyncio.Lock(), LoRARegistry()
            self.pending_lora_unloads: dict[str, str] = {}
            self.lora_ref_cache: dict[str, Any] = {}
            answers: dict[str, Callable[[Any], Any]] = {
                "flush_cache": lambda _: io_struct.FlushCacheReqOutput(success=True),
                "update_weight_version": lambda _: io_struct.UpdateWeightVersionReqOutput(),
                "get_internal_state": lambda _: io_struct.GetInternalStateReqOutput(internal_state={}),
            }
            answers["update_lora_adapter"] = _Adapters().answer
            names = ["init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed"]
            names += ["update_weights_from_tensor", "begin_weight_update", "end_weight_update"]
            answers |= {name: getattr(scheduler, name) for name in names}
            for name, answer in answers.items():
                setattr(self, f"{name}_communicator", self.communicator(FanOutCommunicator, answer))

        def communicator(self, kind: Any, answer: Callable[[Any], Any]) -> Any:
            def send(request: Any) -> None:
                loop = asyncio.get_running_loop()

                def work() -> None:
                    with self.busy:
                        result = answer(request)
                    loop.call_soon_threadsafe(communicator.handle_recv, result)

                threading.Thread(target=work, daemon=True).start()

            communicator = kind(send, 1)
            return communicator

        def auto_create_handle_loop(self) -> None: ...

        def abort_request(self, **_: object) -> None: ...

        async def _async_dispatch_to_scheduler(self, request: object) -> None: ...

        def record_config_updates(self, source: str, **fields: str) -> None:
            self.version = fields["weight_version"]

    return Manager()
