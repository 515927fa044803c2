"""vLLM receives weights: its routes, its worker, its transfer engine, its models; and its trainer takes our source."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from gloo_wire import OverGloo
from models import shard, tiny
from peers.vllm_models import assert_arrived, make_base, new, prepare
from peers.vllm_server import TIMEOUT, Server, stub_cuda
from ranks import free_port, run_ranks

from fsdp_export import Exporter
from fsdp_export.errors import ExportError, SinkError
from fsdp_export.sinks.vllm_store import IdStore
from fsdp_export.transfer.buckets import lay_out
from fsdp_export.weight_source import WeightSource

KINDS = ["qwen3", "qwen3-moe"]
NUM_UPDATES = 3


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prepare(tmp_path_factory.mktemp("cache"))
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_base(kind, folder)
        new(kind, folder)  # what transformers imports for it, here once for all ranks
    import uvicorn  # noqa: F401
    from vllm.v1.worker.gpu_worker import Worker  # noqa: F401

    return folder


@pytest.fixture
def server(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(folder / getattr(request, "param", "qwen3") / "base", tmp_path).running() as running:
        yield running


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def at(kind: str, folder: Path, num_changes: int) -> Mapping[str, torch.Tensor]:
    """Return what the server must have after so many changes."""
    model = new(kind, folder)
    for _ in range(num_changes):
        change(model)
    return model.state_dict()


def amid_experts(exporter: Exporter) -> int:
    """Return how many buckets of one module each come before that of the third expert, which vLLM makes one of."""
    layouts = lay_out(exporter.plan.in_order_of_delivery(exporter.bucket_bytes).outputs, 1)
    return next(number for number, layout in enumerate(layouts) if "experts.2" in layout.entries[0].info.name)


def kind_of(server: Server) -> str:
    return server.folder.parent.name


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("server", KINDS, indirect=True)
def test_three_updates_reach_the_model_of_vllm(server, folder, bucket_bytes):
    kind = kind_of(server)

    def check() -> list[Any]:
        model = shard(new(kind, folder), "1d", 3)
        exporter, sink, seen = Exporter(model), OverGloo(server.url, bucket_bytes=bucket_bytes, timeout=TIMEOUT), []
        for _ in range(NUM_UPDATES):
            exporter.send(sink)
            if sink.num_updates:
                seen.append((server.save(sink.next_version), server.state()))
            change(model)
        return seen

    seen, *_ = run_ranks(check, 3)
    assert len(seen) == NUM_UPDATES
    for number, (path, state) in enumerate(seen):
        assert_arrived(kind, torch.load(path).items(), at(kind, folder, number))
        assert (state["version"], state["paused"]) == (str(number + 1), False)
        calls = [call for before, call in pairwise(["", *state["calls"]]) if call != before]
        join = ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"] if number == 0 else []
        assert calls == [
            "pause keep",
            *join,
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "reset_prefix_cache True",
            "reset_encoder_cache",
        ]


@pytest.mark.parametrize("server", ["qwen3-moe"], indirect=True)
@pytest.mark.parametrize("failing", ["the model", "a rank"])
def test_after_an_update_that_failed_the_next_one_is_whole(server, folder, failing):
    kind = kind_of(server)

    class Failing(OverGloo):
        is_off = False

        def write(self, piece):
            super().write(piece)
            if not self.is_off and failing == "a rank" and dist.get_rank() == 2 and "experts.2" in piece.info.name:
                raise ValueError("a rank ran out of luck")

    def check() -> Any:
        model = shard(new(kind, folder), "1d", 3)
        exporter, sink = Exporter(model, bucket_bytes=1), Failing(server.url, bucket_bytes=1, timeout=TIMEOUT)
        if dist.get_rank() == 0 and failing == "the model":
            server.fail(amid_experts(exporter))
        begin = time.monotonic()
        with pytest.raises(ExportError) as caught:
            exporter.send(sink)
        seconds = time.monotonic() - begin
        state = server.state() if dist.get_rank() == 0 else {}
        Failing.is_off = True
        change(model)
        exporter.send(sink)
        return str(caught.value), seconds, state

    messages, seconds, (state, *_) = zip(*run_ranks(check, 3), strict=True)
    assert len(set(messages)) == 1
    assert f"{failing} ran out of luck" in messages[0]
    if failing == "the model":
        assert messages[0].endswith("The servers stay paused until an update succeeds.")
    assert max(seconds) < 10
    assert (state["version"], state["paused"]) == ("1-given-up", True)
    assert "update_weights" in state["calls"]
    assert state["elements_kept"] == 0
    assert_arrived(kind, torch.load(server.save("last")).items(), at(kind, folder, 1))


@pytest.mark.parametrize("server", ["qwen3-moe"], indirect=True)
def test_vllm_keeps_parts_of_modules_when_an_update_is_not_given_up(server, folder):
    """The reason why the sink does: they would count as parts of the next update."""

    class Hasty(OverGloo):
        def _cancel(self) -> None:
            self.disconnect()

    def check() -> int:
        exporter, sink = Exporter(new("qwen3-moe", folder)), Hasty(server.url, bucket_bytes=1, timeout=TIMEOUT)
        server.fail(amid_experts(exporter))
        with pytest.raises(SinkError, match="the model ran out of luck"):
            exporter.send(sink)
        before = server.state()["elements_kept"]
        sink._control.give_up()
        assert server.state()["elements_kept"] == 0
        return before

    assert run_ranks(check, 1)[0] > 0


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one by one"])
@pytest.mark.parametrize("server", KINDS, indirect=True)
def test_a_trainer_engine_of_vllm_takes_our_source(server, folder, packed):
    kind, port = kind_of(server), free_port()

    def check() -> list[Any]:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        stub_cuda()
        model = shard(new(kind, folder), "1d", 3)
        client = HTTPVLLMWeightSyncClient(server.url, timeout=TIMEOUT)
        info = NCCLTrainerInitInfo(
            rank=dist.get_rank(),
            master_address="127.0.0.1",
            master_port=port,
            world_size=2,
            packed=packed,
            packed_buffer_size_bytes=10_000,
        )
        source = WeightSource(Exporter(model, bucket_bytes=30_000))
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        seen: list[str] = []
        for _ in range(NUM_UPDATES):
            engine.send_weights()
            dist.barrier()
            if dist.get_rank() == 0:
                seen.append(server.save(str(len(seen))))
            change(model)
        return seen

    seen, *_ = run_ranks(check, 3)
    assert len(seen) == NUM_UPDATES
    for number, path in enumerate(seen):
        assert_arrived(kind, torch.load(path).items(), at(kind, folder, number))


@pytest.mark.parametrize("max_bytes", [1, 150, 1 << 20])
def test_what_vllm_unpacks_of_a_bucket_is_what_was_packed(max_bytes):
    """Eight-byte integers, floats of four, and shapes of odd sizes, none of which begins unaligned."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    stub_cuda()
    model = tiny()
    model.up = torch.nn.Parameter(torch.randn(3).to(torch.bfloat16))
    received: dict[str, torch.Tensor] = {}
    for bucket in Exporter(model).buckets(max_bytes, align=1):
        packed_nccl_broadcast_consumer(
            iterator=iter([(e.info.name, (list(e.info.shape), e.info.dtype)) for e in bucket.entries]),
            group=SimpleNamespace(broadcast=lambda out, sent=bucket.buffer, **_: out.copy_(sent)),
            src=0,
            post_unpack_func=received.update,
            buffer_size_bytes=max(bucket.buffer.numel(), max_bytes),
            num_buffers=1,
            device="cpu",
        )
    expected = expected_export(model)
    assert_same({name: received[name] for name in expected}, expected)


def test_an_id_in_a_store_is_what_older_workers_look_for():
    from vllm.distributed.utils import StatelessProcessGroup

    unique_id = bytes(range(128))
    with IdStore(unique_id, "127.0.0.1", 3, 10) as store:
        for rank in (1, 2):
            group = StatelessProcessGroup.create("127.0.0.1", store.port, rank, 3)
            assert bytes(group.broadcast_obj(None, src=0)) == unique_id
