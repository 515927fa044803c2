"""Updates of vLLM servers: what arrives, what they are told, and what is left when something fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest
from engine_updates import (
    alone,
    changed,
    fail_and_update_again,
    fail_on_one_rank,
    slow,
    update_three_times,
)
from exports import expected_export
from fake_server import digests_of
from fake_vllm import FakeVLLM
from faults import FOREVER
from gloo_wire import OverGloo
from models import tiny
from ranks import run_ranks
from torch import nn

from fsdp_export import Exporter
from fsdp_export.errors import SinkError, UsageError
from fsdp_export.sinks.sglang import SGLang
from fsdp_export.sinks.vllm import VLLM
from fsdp_export.transfer.servers import Server


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = FakeVLLM()
    yield fake
    fake.stop()


def sink_for(*servers: FakeVLLM, **options) -> OverGloo:
    return OverGloo([server.url for server in servers], **({"bucket_bytes": 200, "timeout": 60} | options))


UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_three_updates_bring_the_weights_of_the_time_to_all_workers(bucket_bytes):
    servers = [FakeVLLM(num_workers=2), FakeVLLM()]

    try:
        states = update_three_times(servers, lambda: sink_for(*servers, bucket_bytes=bucket_bytes))
    finally:
        for server in servers:
            server.stop()
    for number, both in enumerate(states):
        for state in both:
            assert state["weights"] == digests_of(expected_export(changed(number)))
            assert (state["version"], state["paused"]) == (str(number + 1), False)
            calls = [call for n, call in enumerate(state["calls"]) if not n or call != state["calls"][n - 1]]
            begin = ["get_world_size true", "weight_info", "pause keep true", "weight_info"]
            join = ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"] if number == 0 else []
            end = ["weight_info", "reset_prefix_cache true", "reset_encoder_cache", "resume"]
            assert calls == [*begin, *join, "update_weight_version", *UPDATE, *end]


def test_the_caller_chooses_version_pause_and_caches(server):
    def check() -> None:
        sink = sink_for(server, pause="abort", flush_cache=False)
        sink.version = 7
        exporter = Exporter(tiny())
        exporter.send(sink)
        state = server.state()
        assert (state["version"], state["paused"]) == ("7", False)
        assert "pause abort false" in state["calls"]
        assert not any("cache" in call for call in state["calls"])
        sink.pause = None
        with pytest.raises(SinkError, match=r"HTTP 500: AssertionError.*servers must not generate until an update"):
            exporter.send(sink)
        assert "pause abort false" not in server.state()["calls"]

    alone(check)


def test_workers_that_know_no_id_learn_it_from_a_store():
    server = FakeVLLM(num_workers=2, joins_by_id=False)
    try:
        alone(lambda: Exporter(tiny()).send(sink_for(server)))
        assert server.state()["weights"] == digests_of(expected_export(tiny()))
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        *(
            (route, "refuse")
            for route in ("pause", "init_weight_transfer_engine", *UPDATE, "reset_prefix_cache", "resume")
        ),
        *(("update_weights", kind) for kind in ("refuse late", "stall", "die")),
        ("init_weight_transfer_engine", "stall"),
        ("finish_weight_update", "die"),
    ],
)
def test_a_server_that_fails_ends_the_update_on_all_ranks_and_takes_the_next_one(route, kind):
    server, after = FakeVLLM(num_workers=2), 3 if route == "update_weights" else 0
    message, failed, state = fail_and_update_again(
        server, route, kind, partial(sink_for, server, timeout=FOREVER), after=after
    )
    where = f"POST {server.url}/{route}"
    what = {"stall": "within 1 s", "die": "Connection aborted"}.get(kind, "CUDA ran out of luck")
    assert re.search(f"{where}.*{what}", message)
    if route in {*UPDATE, "reset_prefix_cache"}:
        assert message.endswith("The servers stay paused until an update succeeds.")
    if failed:
        assert failed["paused"] is (route not in {"pause", "init_weight_transfer_engine"})
    assert (state["version"], state["paused"]) == ("1", False)
    assert state["weights"] == digests_of(expected_export(changed(1)))


def test_a_server_that_was_restarted_or_has_more_workers_is_joined_anew(server):
    def check() -> None:
        sink, exporter = sink_for(server), Exporter(tiny())
        exporter.send(sink)
        server.stop()
        for num_workers in (1, 3):
            with server.restarted(num_workers):
                exporter.send(sink)
                assert server.state()["weights"] == digests_of(expected_export(tiny()))

    alone(check)


def test_what_a_trainer_that_died_left_is_no_part_of_the_next_update(server):
    """What came of a module whose update failed is kept by vLLM, and counts as a part of the next one."""

    def check() -> None:
        first = sink_for(server, bucket_bytes=1)
        server.fail("update_weights", "refuse", after=2)
        first.abort = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SinkError):
            Exporter(tiny()).send(first)
        assert server.state()["version"] == "1-incomplete"
        Exporter(changed(1)).send(sink_for(server))

    alone(check)
    assert server.state()["weights"] == digests_of(expected_export(changed(1)))


def test_a_rank_that_fails_in_between_leaves_no_worker_waiting(server):
    state = fail_on_one_rank(server, OverGloo)
    assert (state["version"], state["paused"]) == ("1-given-up", True)
    assert state["calls"][-2:] == ["weight_info", "finish_weight_update"]
    assert server.state()["weights"] == digests_of(expected_export(changed(1)))


def test_a_slow_receiver_is_waited_for_by_three_ranks(server):
    """trl#7103: ranks that gather ahead of the one that sends must not hang."""
    slow(server, OverGloo)
    assert server.state()["weights"] == digests_of(expected_export(tiny()))


def test_a_server_without_the_routes_tells_how_to_get_them(server):
    server.fail("get_world_size", "hide")
    with pytest.raises(SinkError, match=r"HTTP 404.*Start vLLM with VLLM_SERVER_DEV_MODE=1"):
        Exporter(tiny()).send(sink_for(server))


@pytest.mark.parametrize("options", [{"urls": []}, {"urls": ["http://a", "http://a"]}, {"urls": "a", "pause": "x"}])
def test_options_that_cannot_work(options):
    with pytest.raises(UsageError):
        VLLM(**options)


def test_servers_are_resumed_before_an_update_begins_but_not_if_one_before_it_failed(server):
    def check() -> list[bool]:
        exporter, sink, paused = Exporter(tiny()), sink_for(server), []
        for route in ("init_weight_transfer_engine", "update_weights", "init_weight_transfer_engine"):
            server.fail(route, "refuse")
            with pytest.raises(SinkError, match=route):
                exporter.send(sink)
            paused.append(server.state()["paused"])
        return paused

    assert run_ranks(check, 1) == [[False, True, True]]


@pytest.mark.parametrize("found", [0, -1, True, "2", None])
def test_a_number_of_workers_that_cannot_be_is_an_error_with_the_server(found, monkeypatch):
    monkeypatch.setattr(Server, "get", lambda *_, **__: {"world_size": found, "tp_size": found})
    for sink in (VLLM("http://a:1"), SGLang("http://a:1", backend="gloo")):
        with pytest.raises(SinkError, match=r"^http://a:1 .*expected"):
            Exporter(nn.Linear(1, 1)).send(sink)
