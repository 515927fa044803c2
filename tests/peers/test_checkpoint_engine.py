"""checkpoint-engine's own worker takes what every rank sends, in the engine that the other tests use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq
from checkpoint_engine import worker
from exports import assert_same, expected_export
from faults import Outcome, outcome_of, the_error
from ipc_engine import Engine, FileIPC, engine
from models import hf_model, shard
from ranks import run_ranks

from fsdp_export import Exporter


class NoDevice:
    """Stands in for the GPU that it asks to wait and to free memory."""

    device_module = SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)


def serve(address: str, load: Callable[[list[tuple[str, torch.Tensor]]], None], finish: Callable[[], None]) -> None:
    """Let the real worker take part in an update; what it does is that of a GPU, but for the number of the device."""
    if hasattr(worker, "DeviceManager"):
        worker.DeviceManager = NoDevice
    else:
        for name in ("synchronize", "empty_cache"):
            setattr(torch.cuda, name, lambda: None)
    # Without a number of a device the handle is called as it is.
    device: Any = None
    worker.update_weights_from_ipc(zmq.Context.instance(), address, device, run=load, post_hook=finish)


def with_odd_dtypes() -> torch.nn.Module:
    """Return a model with tensors of every element size, of none, and of no dimension."""
    model = hf_model("qwen2").bfloat16()
    model.register_buffer("steps", torch.tensor(2**40 + 1))
    model.register_buffer("scale", torch.randn(3, 5))
    model.register_buffer("nothing", torch.empty(0, 4))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("eight", torch.randn(7).to(torch.float8_e4m3fn))
    return model


def doubled(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 20])
def test_three_updates_in_a_row_are_bit_exact(kind, bucket_bytes, tmp_path):
    def update(number: int) -> None:
        sink = FileIPC(running.url, tmp_path, engine=kind, bucket_bytes=bucket_bytes, timeout=20)
        model = with_odd_dtypes()
        for _ in range(number):
            doubled(model)
        exporter = Exporter(shard(model, "1d", 2))
        exporter.send(sink)
        for _ in range(2):
            doubled(model)
            exporter.send(sink)

    with engine(2, serve) as running:
        run_ranks(update, 2, 0)
        expected = with_odd_dtypes()
        for _ in range(2):
            doubled(expected)
        tensors = expected_export(expected)
        for number in range(2):
            weights = running.weights(number)
            assert weights.keys() == tensors.keys()
            assert_same({name: weights[name] for name in tensors}, tensors)


@pytest.mark.parametrize("fault", ["raise", "die", "stall", "finish"])
def test_a_worker_that_fails_is_one_error_and_the_next_update_succeeds(fault, tmp_path):
    with engine(2, serve) as running:
        running.set_fault(1, fault)
        assert WORDS[fault] in update_twice(running, tmp_path)


@pytest.mark.parametrize("step", ["write", "_share", "_end"])
def test_a_rank_that_raises_sends_the_workers_home_and_the_next_update_succeeds(step, tmp_path):
    def inject(sink: FileIPC) -> None:
        def failing(*_: Any) -> None:
            raise ValueError("out of luck")

        if dist.get_rank() == 1:
            setattr(sink, step, failing)

    with engine(2, serve) as running:
        assert "out of luck" in update_twice(running, tmp_path, inject, step)


def update_twice(
    running: Engine, folder: Path, inject: Callable[[FileIPC], object] = lambda _: None, step: str = ""
) -> str:
    """Update twice, the first time in vain, and return why."""

    def check() -> Outcome:
        sink = FileIPC(running.url, folder, engine="vllm", bucket_bytes=1, timeout=1.5)
        exporter = Exporter(shard(hf_model("llama"), "1d", 2))
        inject(sink)
        outcome = outcome_of(lambda: exporter.send(sink))
        running.may_go_on.set()
        sink.__dict__.pop(step, None)
        sink.timeout = 20
        exporter.send(sink)
        return outcome

    _, text = the_error(run_ranks(check, 2))
    tensors = expected_export(hf_model("llama"))
    for number in range(2):
        weights = running.weights(number)
        assert_same({name: weights[name] for name in tensors}, tensors)
    return text


VERSION = tuple(map(int, metadata.version("checkpoint-engine").split(".")[:2]))
WORDS = {
    "raise": "no room for these weights" if VERSION >= (0, 2) else "on GPU-1 hung up before it had taken",
    "die": "on GPU-1 hung up before it had taken",
    "stall": "on GPU-1 did not take",
    "finish": "these weights cannot be finished" if VERSION >= (0, 4) else "hung up before it had taken the end of the",
}
