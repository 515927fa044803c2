"""SGLang's own routes, session, process group, unpickler and loaders take what is sent, on the CPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
import torch.distributed as dist
from fake_server import digests_of
from hub_models import hub_model
from models import shard, tiny
from peers.sglang_server import Server, define_operators_of_torchvision
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter
from fsdp_export.errors import ExportError, SinkError
from fsdp_export.sinks.lora_servers import LoRAServers
from fsdp_export.sinks.sglang import SGLang
from fsdp_export.transfer.buckets import Entry

KINDS = ["tiny", "qwen3", "qwen3-moe", "deepseek-v3"]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import SGLang here once for all servers."""
    define_operators_of_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.entrypoints.http_server  # noqa: F401


def made(kind: str) -> Any:
    return tiny() if kind == "tiny" else hub_model(kind)


class Receiver(nn.Module):
    """A model that keeps what it is given under its name, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}
        self.num_calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_calls += 1
        for name, value in weights:
            self.weights[name] = value.clone()

    def digests(self) -> dict[str, list[Any]]:
        return digests_of(self.weights)


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server(Receiver, digests=Receiver.digests, calls=lambda module: module.num_calls)
    yield started
    started.stop()


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def expected(kind: str, num_changes: int, folder: Any) -> dict[str, list[Any]]:
    model = made(kind)
    for _ in range(num_changes):
        change(model)
    if kind == "tiny":
        return digests_of({name: value for name, value in model.state_dict().items() if name != "head.weight"})
    model.save_pretrained(folder)
    return digests_of(load_file(folder / "model.safetensors"))


def new_sink(*servers: Server, **options: Any) -> SGLang:
    options = {"bucket_bytes": 1_000, "timeout": 10, "backend": "gloo", **options}
    return SGLang([server.url for server in servers], **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [1_000, 1 << 30])
def test_three_updates_from_three_ranks_arrive_in_two_servers(server, kind, bucket_bytes, tmp_path):
    other = Server(Receiver, digests=Receiver.digests, calls=lambda module: module.num_calls)

    def check() -> list[list[Any]]:
        model, sink, arrived = shard(made(kind), "1d", 3), new_sink(server, other, bucket_bytes=bucket_bytes), []
        exporter = Exporter(model)
        for number in range(3):
            sink.version = f"step-{number}"
            exporter.send(sink)
            if dist.get_rank() == 0:
                arrived.append([(each.ask("digests"), each.ask("state")) for each in (server, other)])
            change(model)
        sink.disconnect()
        return arrived

    try:
        arrived, *_ = run_ranks(check, 3)
    finally:
        other.stop()
    for number, both in enumerate(arrived):
        for digests, state in both:
            assert digests == expected(kind, number, tmp_path)
            assert state == {"paused": False, "open": False, "version": f"step-{number}"}
    assert (server.ask("calls") == 3) is (bucket_bytes == 1 << 30)


def test_weights_in_bfloat16_with_a_router_in_float32_stay_aligned(server):
    def check() -> dict[str, list[Any]]:
        exporter = Exporter(shard(tiny(), "1d", 2), dtype=torch.bfloat16, keep_dtype=["*.bias"], bucket_bytes=500)
        exporter.send(new_sink(server, bucket_bytes=500))
        return digests_of(dict(exporter.tensors()))

    sent, *_ = run_ranks(check, 2)
    assert len({dtype for dtype, _, _ in sent.values()}) == 3
    assert server.ask("digests") == sent


class Loader(nn.Module):
    """SGLang's loader of DeepSeek over the parameters that SGLang has for q_a_proj and kv_a_proj_with_mqa."""

    do_load_weights: Any

    def __init__(self) -> None:
        from sglang.srt.models.deepseek_common import deepseek_weight_loader

        super().__init__()
        loader = deepseek_weight_loader.DeepseekV2WeightLoaderMixin
        self.config = made("deepseek-v3").config
        self.config.num_nextn_predict_layers = 0
        self.quant_config, self.num_fused_shared_experts = None, 0
        self.pp_group = SimpleNamespace(is_last_rank=True)
        self.names = [f"model.layers.{layer}.self_attn" for layer in range(self.config.num_hidden_layers)]
        rows: int = self.config.q_lora_rank + self.config.kv_lora_rank + self.config.qk_rope_head_dim
        self.fused = {
            f"{name}.fused_qkv_a_proj_with_mqa.weight": nn.Parameter(torch.full((rows, self.config.hidden_size), 7.0))
            for name in self.names
        }
        self.model = nn.Module()
        for name in ("do_load_weights", "_initialize_nextn_conf", "_maybe_quant_weights_to_fp8_ue8m0"):
            setattr(self, name, getattr(loader, name).__get__(self))

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.fused.items())

    def post_load_weights(self, **_: object) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.do_load_weights([(name, value) for name, value in weights if ".self_attn." in name])

    def digests(self) -> dict[str, list[Any]]:
        return digests_of(self.fused)


@pytest.mark.parametrize("bucket_bytes", [1, 3_000, 1 << 30])
def test_sglang_fuses_what_it_fuses_whatever_the_size_of_buckets(bucket_bytes, tmp_path):
    """sglang#14178 (G4): of a pair that comes in two calls nothing is loaded, without a word."""
    loader = Server(Loader, digests=Loader.digests)
    try:
        run_ranks(
            lambda: Exporter(shard(hub_model("deepseek-v3"), "1d", 2)).send(
                new_sink(loader, bucket_bytes=bucket_bytes)
            ),
            2,
        )
        digests = loader.ask("digests")
    finally:
        loader.stop()
    made("deepseek-v3").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    parts = {name: name.replace("fused_qkv_a_proj_with_mqa", "q_a_proj") for name in digests}
    assert digests == digests_of(
        {
            name: torch.cat([saved[part], saved[part.replace("q_a_proj", "kv_a_proj_with_mqa")]])
            for name, part in parts.items()
        }
    )


def test_buckets_of_our_iterator_pass_sglangs_unpickler_as_flattened_buckets():
    from peers.sglang_server import _scheduler
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput as Request
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata as Metadata

    def metadata(entry: Entry) -> Metadata:
        info, end = entry.info, entry.offset + entry.info.num_bytes
        return Metadata(info.name, torch.Size(info.shape), info.dtype, entry.offset, end, info.num_bytes)

    def check() -> None:
        # All of them before SGLang patches how tensors are pickled, which then takes those of GPUs alone.
        payloads = [
            MultiprocessingSerializer.serialize(
                {"flattened_tensor": bucket.buffer, "metadata": [metadata(entry) for entry in bucket.entries]}
            )
            for bucket in Exporter(tiny()).buckets(500, align=1)
        ]
        module = Receiver()
        scheduler = _scheduler(module)
        assert scheduler.begin_weight_update(SimpleNamespace(selector="all")).success
        for payload in payloads:
            request = Request(
                serialized_named_tensors=[payload], load_format="flattened_bucket", selector="all", flush_cache=False
            )
            answer = scheduler.update_weights_from_tensor(request)
            assert answer.success, answer.message
        assert scheduler.end_weight_update(None).success
        assert module.num_calls > 1
        assert module.digests() == expected("tiny", 0, None)

    run_ranks(check, 1)


def test_a_server_that_is_killed_within_an_update_is_an_error_and_takes_the_next_one(server):
    def check() -> tuple[str, float]:
        class Killing(SGLang):
            def _send(self, bucket):
                if any(entry.info.name == "two_rows" for entry in bucket.entries):
                    server.kill()
                super()._send(bucket)

        sink = Killing(server.url, bucket_bytes=1, timeout=10, backend="gloo")
        model = shard(tiny(), "1d", 3)
        exporter, begin = Exporter(model, bucket_bytes=1), time.monotonic()
        with pytest.raises(SinkError, match="The servers stay paused") as caught:
            exporter.send(sink)
        seconds = time.monotonic() - begin
        del Killing._send
        server.wait()
        exporter.send(sink)
        return str(caught.value), seconds

    messages, seconds = zip(*run_ranks(check, 3), strict=True)
    assert len(set(messages)) == 1
    assert f"{server.url}/update_weights_from_distributed" in messages[0]
    assert max(seconds) < 8
    assert server.ask("digests") == expected("tiny", 0, None)
    assert not server.ask("state")["paused"]


def test_what_a_loader_refuses_is_told_and_the_session_is_ended():
    def fail(_: object) -> None:
        raise ValueError("no such parameter: blocks.0.norm.weight")

    class Refusing(Receiver):
        def load_weights(self, weights):
            super().load_weights(weights)
            if self.num_calls == 2:
                fail(weights)

    server = Server(Refusing, digests=Receiver.digests)

    def check() -> None:
        sink, exporter = new_sink(server, bucket_bytes=300), Exporter(shard(tiny(), "1d", 2), bucket_bytes=300)
        with pytest.raises(SinkError, match=r"(?s)no such parameter: blocks\.0\.norm.*The servers stay paused"):
            exporter.send(sink)
        if dist.get_rank() == 0:
            assert server.ask("state") == {"paused": True, "open": False, "version": "default"}
        exporter.send(sink)
        if dist.get_rank() == 0:
            assert server.ask("state") == {"paused": False, "open": False, "version": "1"}
            assert server.ask("digests") == expected("tiny", 0, None)

    try:
        run_ranks(check, 2)
    finally:
        server.stop()


def test_a_rank_that_fails_leaves_the_server_able_to_take_the_next_update(server):
    def check() -> None:
        class Failing(SGLang):
            def write(self, piece):
                super().write(piece)
                if dist.get_rank() == 2 and piece.info.name == "two_rows":
                    raise ValueError("out of luck")

        sink = Failing(server.url, bucket_bytes=1, timeout=10, backend="gloo")
        exporter, begin = Exporter(shard(tiny(), "1d", 3), bucket_bytes=1), time.monotonic()
        with pytest.raises(ExportError, match="out of luck"):
            exporter.send(sink)
        assert time.monotonic() - begin < 8
        if dist.get_rank() == 0:
            assert server.ask("state") == {"paused": True, "open": False, "version": "default"}
        del Failing.write
        exporter.send(sink)

    run_ranks(check, 3)
    assert server.ask("digests") == expected("tiny", 0, None)
    assert server.ask("state") == {"paused": False, "open": False, "version": "1"}


@pytest.mark.parametrize("name", ["policy", "policy-{version}"])
def test_adapters_are_loaded_version_by_version(server, name, tmp_path):
    from peft_models import quiet, with_lora

    def check() -> None:
        exporter = Exporter(fully_shard(with_lora("plain")), lora="adapter")
        servers = LoRAServers(server.url, engine="sglang", name=name, keep=1)
        for step in range(3):
            exporter.save(tmp_path / f"step-{step}", published=servers.load, fsync=False)
            assert [path.name for path in servers.loaded] == [f"step-{step}"] * (dist.get_rank() == 0)

    run_ranks(check, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    # SGLang tells what it has when it loads another one.
    with quiet():
        with_lora("plain").save_pretrained(tmp_path / "other")
    body = {"lora_name": "other", "lora_path": str(tmp_path / "other")}
    loaded = requests.post(server.url + "/load_lora_adapter", json=body, timeout=10).json()["loaded_adapters"]
    rank = with_lora("plain").peft_config["default"].r
    names = (name.replace("{version}", "step-2"), "other")
    assert loaded == {said: f"{tmp_path / path} {rank}" for said, path in zip(names, ("step-2", "other"), strict=True)}
