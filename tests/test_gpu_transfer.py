"""Updates of engines over NCCL: receivers are a process of their own, on the GPUs that the first rank does not have.

Two ranks of a communicator cannot share a GPU, so a single one is not enough. Run by `bin/test-gpu`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_server import digests_of
from fake_vllm import FakeVLLM
from gpu_models import large_layers, make, sharded
from torch import nn

from fsdp_export import Exporter
from fsdp_export.errors import SinkError
from fsdp_export.sinks.vllm import VLLM
from fsdp_export.transfer.buckets import Bucket
from fsdp_export.weight_source import WeightSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nccl_group"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the receiver needs a GPU of its own"),
]

GIB = 1 << 30


class Shared:
    """A server that the first rank has started, and all ranks know."""

    def __init__(self, fake: FakeVLLM | None, url: str) -> None:
        self.fake, self.url = fake, url

    def state(self) -> dict[str, Any]:
        return self.fake.state() if self.fake is not None else {}


@pytest.fixture
def server() -> Iterator[Shared]:
    others = [f"cuda:{index}" for index in range(1, torch.cuda.device_count())]
    fake = FakeVLLM(devices=others, timeout=60) if dist.get_rank() == 0 else None
    urls = [fake.url if fake is not None else ""]
    dist.broadcast_object_list(urls, device=torch.device("cuda"))
    yield Shared(fake, urls[0])
    dist.barrier()
    if fake is not None:
        fake.stop()


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def assert_received(state: dict[str, Any], num_changes: int, version: str) -> None:
    if dist.get_rank() == 0:
        expected = make()
        for _ in range(num_changes):
            change(expected)
        assert (state["version"], state["paused"]) == (version, False)
        assert state["weights"] == digests_of(expected.state_dict())


def set_timeout(sink: VLLM, seconds: float) -> None:
    sink.timeout = seconds
    for server in sink._control.servers:
        server._timeout = seconds
    if sink._communicator is not None:
        sink._communicator._timeout = seconds


@pytest.mark.parametrize("bucket_bytes", [1, 300_000, GIB])
@pytest.mark.parametrize("kind", ["gpu", "pinned", "some"])
def test_three_updates_bring_the_weights_of_the_time(server, kind, bucket_bytes):
    model, sink = sharded(kind), VLLM(server.url, bucket_bytes=bucket_bytes, timeout=30)
    exporter = Exporter(model)
    for number in range(3):
        exporter.send(sink)
        assert_received(server.state(), number, str(number + 1))
        change(model)
    sink.disconnect()


@pytest.mark.parametrize("kind", ["refuse", "refuse late", "stall", "die"])
def test_a_receiver_that_fails_is_left_and_the_next_update_succeeds(server, kind):
    """But for the second case a broadcast has begun here that never ends by itself."""
    model, sink = sharded("gpu"), VLLM(server.url, bucket_bytes=300_000, timeout=60)
    exporter = Exporter(model)
    exporter.send(sink)
    set_timeout(sink, 1)
    if server.fake is not None:
        server.fake.fail("update_weights", kind, after=2)
    begin = time.monotonic()
    with pytest.raises(SinkError, match=re.escape(server.url)) as caught:
        exporter.send(sink)
    assert time.monotonic() - begin < 20
    assert str(caught.value).endswith("The servers stay paused until an update succeeds.")
    change(model)
    set_timeout(sink, 60)
    with server.fake.restarted() if server.fake is not None and kind == "die" else nullcontext():
        exporter.send(sink)
        assert_received(server.state(), 1, "2")
    sink.disconnect()


@pytest.mark.parametrize("kind", ["gpu", "pinned"])
def test_a_consumer_that_changes_its_stream_behind_work_of_its_own_gets_right_values(kind):
    """As vLLM's trainer does, whose broadcasts the gathers must not wait for."""
    model, expected = sharded(kind), make()
    streams, received, number = [torch.cuda.Stream() for _ in range(2)], dict[str, torch.Tensor](), 0
    for _ in range(2):
        tensors = WeightSource(Exporter(model, bucket_bytes=300_000)).iter_full()
        while True:
            number += 1
            with torch.cuda.stream(streams[number % 2]):
                item = next(tensors, None)
                if item is None:
                    break
                torch.cuda._sleep(3_000_000)  # what comes next is read late
                received[item[0]] = item[1].clone()
                del item
        torch.cuda.synchronize()
        for name, value in expected.state_dict().items():
            assert torch.equal(received[name].cpu(), value), name
        change(model)
        change(expected)


def test_every_update_has_its_memory_from_the_same_streams():
    """What the allocator keeps for one stream serves no other one."""
    source, streams = WeightSource(Exporter(sharded("gpu"), bucket_bytes=300_000)), []
    for _ in range(4):
        for _ in source.iter_full():
            pass
        torch.cuda.synchronize()
        streams.append({segment["stream"] for segment in torch.cuda.memory_snapshot()})
    assert streams == streams[:1] * 4


class Timed(VLLM):
    """Counts the seconds in which bytes move."""

    seconds = 0.0

    def _send(self, bucket: Bucket) -> None:
        communicator: Any = self._communicator
        broadcast = type(communicator).broadcast

        def timed(*arguments: Any, **options: Any) -> None:
            begin = time.perf_counter()
            broadcast(communicator, *arguments, **options)
            self.seconds += time.perf_counter() - begin

        communicator.broadcast = timed
        super()._send(bucket)


@pytest.mark.parametrize("bucket_bytes", [GIB // 4, GIB])
@pytest.mark.parametrize("kind", ["gpu", "pinned"])
def test_how_fast_an_update_is(server, kind, bucket_bytes, capsys):
    model = large_layers(kind)
    exporter, sink = Exporter(model), Timed(server.url, bucket_bytes=bucket_bytes, timeout=60)
    seconds = []
    for _ in range(4):
        sink.seconds = 0.0
        dist.barrier()
        begin = time.perf_counter()
        exporter.send(sink)
        seconds.append((time.perf_counter() - begin, sink.seconds))
    sink.disconnect()
    if dist.get_rank() == 0:
        whole, sending = min(seconds[1:])
        num_bytes = exporter.plan.num_bytes
        with capsys.disabled():
            print(
                f"\nvLLM over NCCL, {kind}, {num_bytes / 1e9:.1f} GB in buckets of {bucket_bytes >> 20} MiB to"
                f" {torch.cuda.device_count() - 1} GPUs: {whole:.3f} s, {num_bytes / 1e9 / whole:.0f} GB/s;"
                f" broadcast alone {num_bytes / 1e9 / sending:.0f} GB/s; first update {seconds[0][0]:.1f} s"
            )
