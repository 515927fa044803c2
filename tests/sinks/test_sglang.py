"""Updates of SGLang servers: what arrives, what they are told, and what is left when something fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

import pytest
from engine_updates import (
    alone,
    changed,
    fail_and_update_again,
    fail_on_one_rank,
    lose_patience,
    slow,
    update_three_times,
)
from exports import expected_export
from fake_server import digests_of
from fake_sglang import FakeSGLang
from faults import FOREVER
from hub_models import hub_model
from models import tiny
from ranks import free_port
from safetensors.torch import load_file

from fsdp_export import Exporter
from fsdp_export.errors import ExportError, SinkError, UsageError
from fsdp_export.sinks.sglang import SGLang
from fsdp_export.transfer import process_group

PAUSED = "The servers stay paused until an update succeeds."
UPDATE = ["update_weights_from_distributed all"]
BEGIN = ["server_info", "pause_generation retract", "begin_weight_update all"]
FLUSH = ["end_weight_update", "flush_cache 0"]


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    fake = FakeSGLang()
    yield fake
    fake.stop()


def sink_for(*servers: FakeSGLang, **options) -> SGLang:
    options = {"bucket_bytes": 200, "timeout": 60, "backend": "gloo", **options}
    return SGLang([server.url for server in servers], **options)


def without_repeats(calls: Sequence[str]) -> list[str]:
    return [call for number, call in enumerate(calls) if not number or call != calls[number - 1]]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_three_updates_bring_the_weights_of_the_time_to_all_workers(bucket_bytes):
    servers = [FakeSGLang(num_workers=2), FakeSGLang()]

    try:
        states = update_three_times(servers, lambda: sink_for(*servers, bucket_bytes=bucket_bytes))
        assert [server.state()["calls"] for server in servers] == [["destroy_weights_update_group"]] * 2
    finally:
        for server in servers:
            server.stop()
    for number, both in enumerate(states):
        for state in both:
            assert state["weights"] == digests_of(expected_export(changed(number)))
            assert (state["version"], state["paused"], state["open"]) == (str(number + 1), False, False)
            join = [] if number else ["init_weights_update_group"]
            version = [f"update_weight_version {number + 1}"]
            calls = [BEGIN[0], *join, *BEGIN[1:], *UPDATE, *FLUSH, *version, "continue_generation"]
            assert without_repeats(state["calls"]) == calls


def test_the_caller_chooses_version_pause_and_caches(server):
    def check() -> None:
        sink = sink_for(server, pause="abort", flush_cache=False, bucket_bytes=1 << 20)
        sink.version = "step-7"
        exporter = Exporter(tiny())
        exporter.send(sink)
        state = server.state()
        assert (state["version"], state["paused"]) == ("step-7", False)
        assert "pause_generation abort" in state["calls"]
        assert not any("flush" in call for call in state["calls"])
        sink = sink_for(server, pause=None)
        exporter.send(sink)
        calls = without_repeats(server.state()["calls"])
        assert calls[2:] == ["begin_weight_update all", *UPDATE, FLUSH[0], "flush_cache 30", "update_weight_version 1"]

    alone(check)


def test_servers_that_are_older_have_no_session_and_no_versions():
    server = FakeSGLang(has_session=False)

    def check() -> None:
        server.fail("update_weight_version", "hide")
        sink = sink_for(server)
        Exporter(tiny()).send(sink)
        state = server.state()
        assert state["weights"] == digests_of(expected_export(tiny()))
        assert (state["version"], state["paused"]) == ("default", False)
        assert "end_weight_update" not in state["calls"]

    try:
        alone(check)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("init_weights_update_group", "refuse"),
        ("init_weights_update_group", "stall"),
        ("pause_generation", "break"),
        ("begin_weight_update", "stall"),
        ("update_weights_from_distributed", "refuse"),
        ("update_weights_from_distributed", "break"),
        ("update_weights_from_distributed", "late"),
        ("update_weights_from_distributed", "stall"),
        ("update_weights_from_distributed", "die"),
        ("end_weight_update", "refuse"),
        ("flush_cache", "refuse"),
        ("continue_generation", "break"),
        ("end_weight_update", "die"),
    ],
)
def test_a_server_that_fails_ends_the_update_on_all_ranks_and_takes_the_next_one(route, kind):
    server, after = FakeSGLang(num_workers=2), 3 if "distributed" in route else 0
    message, failed, state = fail_and_update_again(
        server, route, kind, partial(sink_for, server, timeout=FOREVER), after=after
    )
    where = f"POST {server.url}/{route}"
    what = {"stall": "within 1 s", "die": "Connection aborted"}.get(kind, "CUDA ran out of luck")
    assert re.search(f"{where}.*{what}", message)
    is_mixed = route in {"update_weights_from_distributed", "end_weight_update", "flush_cache"}
    assert message.endswith(PAUSED) is is_mixed
    if failed:
        assert failed["paused"] is is_mixed
        assert not failed["open"]
    assert (state["version"], state["paused"], state["open"]) == ("1", False, False)
    assert state["weights"] == digests_of(expected_export(changed(1)))


def test_a_server_that_goes_on_by_itself_is_paused_when_its_weights_are_a_mixture(server):
    def check() -> None:
        sink, exporter = sink_for(server, pause=None, bucket_bytes=1), Exporter(tiny())
        server.fail("update_weights_from_distributed", "refuse", after=2)
        with pytest.raises(SinkError, match=PAUSED):
            exporter.send(sink)
        assert server.state()["paused"]
        exporter.send(sink)
        assert not server.state()["paused"]

    alone(check)


def test_a_server_that_was_restarted_is_joined_anew(server):
    def check() -> None:
        sink, exporter = sink_for(server), Exporter(tiny())
        exporter.send(sink)
        server.stop()
        with server.restarted():
            exporter.send(sink)
            assert server.state()["weights"] == digests_of(expected_export(tiny()))
        assert sink.num_updates == 2

    alone(check)


def test_what_a_trainer_that_died_left_open_is_ended(server):
    def check() -> None:
        first = sink_for(server, bucket_bytes=1)
        server.fail("update_weights_from_distributed", "refuse", after=2)
        first._cancel = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SinkError):
            Exporter(tiny()).send(first)
        assert server.state()["open"]
        Exporter(changed(1)).send(sink_for(server))
        state = server.state()
        assert (state["open"], state["paused"]) == (False, False)
        assert state["weights"] == digests_of(expected_export(changed(1)))

    alone(check)


def test_a_rank_that_fails_in_between_leaves_no_worker_waiting(server):
    state = fail_on_one_rank(server, SGLang, backend="gloo")
    assert (state["paused"], state["open"]) == (True, False)
    assert state["calls"][-2:] == ["end_weight_update", "destroy_weights_update_group"]
    state = server.state()
    assert (state["paused"], state["version"]) == (False, "1")
    assert state["weights"] == digests_of(expected_export(changed(1)))


def test_a_slow_receiver_is_waited_for_by_three_ranks(server):
    """trl#7103: ranks that gather ahead of the one that sends must not hang."""
    slow(server, SGLang, backend="gloo")
    assert server.state()["weights"] == digests_of(expected_export(tiny()))


@pytest.mark.parametrize("bucket_bytes", [1, 2_000, 1 << 30])
def test_what_sglang_fuses_within_one_call_comes_in_one_call(server, bucket_bytes, tmp_path):
    """sglang#14178 (G4): DeepSeek's q_a_proj and kv_a_proj_with_mqa are joined in one load, or lost."""
    hub_model("deepseek-v3").save_pretrained(tmp_path)
    alone(lambda: Exporter(hub_model("deepseek-v3")).send(sink_for(server, bucket_bytes=bucket_bytes)))
    state = server.state()
    assert state["weights"] == digests_of(load_file(tmp_path / "model.safetensors"))
    pairs = [(name, names) for names in state["loads"] for name in names if ".q_a_proj." in name]
    assert len(pairs) == sum(".q_a_proj." in name for name in state["weights"]) > 0
    for name, names in pairs:
        assert name.replace("q_a_proj", "kv_a_proj_with_mqa") in names
    if bucket_bytes == 1:
        assert len(state["loads"]) > len(pairs)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"pp_size": 2}, "pipeline stages.*expected pp_size 1"),
        ({"dp_size": 2}, "data-parallel replicas.*Start a server for each"),
        ({"tp_size": None}, "does not say how many workers.*expected tp_size in /server_info"),
    ],
)
def test_servers_that_cannot_be_updated_are_refused(info, message):
    server = FakeSGLang(**info)

    def check() -> None:
        with pytest.raises(ExportError, match=message):
            Exporter(tiny()).send(sink_for(server))

    try:
        alone(check)
        assert server.state()["calls"] == ["server_info"]
    finally:
        server.stop()


def test_nccl_takes_no_tensors_in_host_memory(server, monkeypatch):
    monkeypatch.setattr("fsdp_export.transfer.process_group.SenderGroup.join", lambda *_: None)
    monkeypatch.setattr("fsdp_export.sinks.sglang_control.Control.join", lambda *_: _Nothing())

    def check() -> None:
        with pytest.raises(UsageError, match=r"NCCL sends from a GPU: found tensors on cpu\. Use backend='gloo'"):
            Exporter(tiny()).send(sink_for(server, backend="nccl"))

    alone(check)
    assert not server.state()["paused"]


class _Nothing:
    def check(self, seconds: float = 0) -> None: ...

    def wait(self) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {"urls": []},
        {"urls": ["http://a", "http://a"]},
        {"pause": "x"},
        {"pause": "in_place"},
        {"selector": "x"},
        {"backend": "mpi"},
    ],
)
def test_options_that_cannot_work(options):
    with pytest.raises(UsageError):
        SGLang(**{"urls": "http://a", **options})


def test_a_chosen_port_is_free_for_the_next_update_although_somebody_keeps_the_errors(server, monkeypatch):
    monkeypatch.setattr(process_group, "_MARGIN", timedelta(seconds=0.5))

    def check() -> None:
        sink, exporter = sink_for(server, port=free_port()), Exporter(tiny())
        errors = []
        update = "update_weights_from_distributed"
        for route, kind in (("init_weights_update_group", "refuse"), (update, "stall"), (update, "late")):
            server.fail(route, kind)
            # Who waits for the others in the store keeps the port for so long.
            sink.timeout = 60.0 if route == update else 2.0
            if kind == "stall":
                lose_patience(sink, route)
            with pytest.raises(SinkError) as caught:
                exporter.send(sink)
            errors.append(caught)
            sink.timeout = 60.0
            exporter.send(sink)
        assert server.state()["weights"] == digests_of(expected_export(tiny()))

    alone(check)
