"""Updates of an SGLang server over NCCL, from one GPU to another; run by `bin/test-gpu`, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_server import digests_of
from fake_sglang import FakeSGLang
from models import tiny
from ranks import free_port, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fsdp_export import Exporter
from fsdp_export.errors import SinkError
from fsdp_export.sinks.sglang import SGLang

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("RANK", "0") != "0", reason="one process is enough"),
]

UPDATE = "update_weights_from_distributed"


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    started = FakeSGLang(device="cuda:1", timeout=600)
    yield started
    started.stop()


def as_trainer(check: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """Call something with a model on the first GPU whose weights are in host memory, in a process of its own.

    Its process group is bound to the device, from which torch would split others.
    """

    def on_rank() -> Any:
        dist.destroy_process_group()
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
        dist.all_reduce(torch.ones(1, device=device))
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
        return check(model)

    return run_ranks(on_rank, 1, timeout=100.0)[0]


def changed(model: nn.Module, times: int) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            for _ in range(times):
                parameter.add_(1)
    return model


def expected(model: nn.Module) -> dict[str, Any]:
    return digests_of({name: value for name, value in model.state_dict().items() if name != "head.weight"})


def test_three_updates_arrive_bit_by_bit(server):
    def check(model: nn.Module) -> list[dict]:
        exporter, sink, states = Exporter(model), SGLang(server.url, bucket_bytes=300, timeout=30), []
        for _ in range(3):
            exporter.send(sink)
            states.append(server.state())
            changed(model, 1)
        sink.disconnect()
        return states

    states = as_trainer(check, tiny())
    for number, state in enumerate(states):
        assert state["weights"] == expected(changed(tiny(), number))
        assert (state["version"], state["paused"]) == (str(number + 1), False)


@pytest.mark.parametrize("kind", ["die", "late", "stall"])
def test_a_server_that_fails_does_not_take_the_trainer_with_it(server, kind):
    server.fail(UPDATE, kind, after=2)

    def check(model: nn.Module) -> tuple[str, float]:
        exporter, sink = Exporter(model), SGLang(server.url, bucket_bytes=1, timeout=3)
        begin = time.monotonic()
        with pytest.raises(SinkError) as caught:
            exporter.send(sink)
        seconds = time.monotonic() - begin
        exporter.send(sink if kind != "die" else SGLang(other.url, timeout=30))
        assert (server if kind != "die" else other).state()["weights"] == expected(tiny())
        return str(caught.value), seconds

    other = FakeSGLang(device="cuda:1")
    try:
        message, seconds = as_trainer(check, tiny())
    finally:
        other.stop()
    print(kind, round(seconds, 1), message)
    assert message.endswith("The servers stay paused until an update succeeds.")
    assert seconds < 20


def test_how_fast_weights_arrive(server):
    layers, width = 16, 8192

    def check(model: nn.Module) -> list[float]:
        exporter, sink, seconds = Exporter(model), SGLang(server.url, timeout=60), []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.monotonic()
            exporter.send(sink)
            seconds.append(time.monotonic() - begin)
        return seconds

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    for parameter in model.to_empty(device="cpu").parameters():
        nn.init.ones_(parameter)
    seconds = as_trainer(check, model)
    gigabytes = layers * width * width * 2 / 1e9
    print(f"{gigabytes:.1f} GB", [f"{gigabytes / each:.1f} GB/s" for each in seconds])
    arrived = digests_of({"weight": torch.ones(width, width, dtype=torch.bfloat16)})["weight"]
    assert server.state()["weights"] == {f"{index}.weight": arrived for index in range(layers)}
