"""Colocated engines: every rank feeds its own worker, and what goes wrong there is one error, soon, on every rank."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from faults import FOREVER, Outcome, before_call, outcome_of, the_error
from ipc_engine import Engine, FileIPC, engine
from live_bytes import left_over, tensors_alive
from models import shard, tiny
from ranks import run_ranks

from fsdp_export import Exporter
from fsdp_export.errors import UsageError
from fsdp_export.sinks.ipc import IPC


def doubled(model: Any, times: int) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2**times)
    return model


def check_weights(running: Engine, num_workers: int, times: int = 0) -> None:
    expected = expected_export(doubled(tiny(), times))
    for worker in range(num_workers):
        weights = running.weights(worker)
        assert weights.keys() == expected.keys()
        assert_same({name: weights[name] for name in expected}, expected)


@pytest.mark.parametrize(("kind", "bucket_bytes"), [("vllm", 1), ("sglang", 600), ("vllm", 1 << 20)])
def test_three_updates_bring_what_the_module_has_at_the_time(kind, bucket_bytes, tmp_path):
    def update(number: int) -> None:
        sink = FileIPC(running.url, tmp_path, engine=kind, bucket_bytes=bucket_bytes, timeout=60)
        model = shard(doubled(tiny(), number), "1d", 2)
        Exporter(model).send(sink)
        doubled(model, 1)
        Exporter(model).send(sink)
        assert sink.num_updates == (2 if dist.get_rank() == 0 else 0)

    with engine(2) as running:
        for number in (0, 1):
            run_ranks(update, 2, number)
            check_weights(running, 2, number + 1)


def send_with_fault(
    running: Engine,
    folder: Path,
    *,
    inject: Callable[[FileIPC], object] = lambda _: None,
    **options: Any,
) -> tuple[str, str]:
    """Update twice with the same objects: return the one error of the first time, and find the second one complete.

    Args:
        running: The engine, whose fault must not come twice.
        folder: For `FileIPC`.
        inject: Prepares a fault on a rank, which must not come twice.
        **options: For `FileIPC`.
    """

    def check() -> Outcome:
        sink = FileIPC(running.url, folder, **{"engine": "vllm", "bucket_bytes": 1, "timeout": FOREVER, **options})
        exporter = Exporter(shard(tiny(), "1d", 2), bucket_bytes=1)
        inject(sink)
        gc.collect()
        gc.disable()
        before = {id(each) for each in tensors_alive()}
        outcome = outcome_of(lambda: exporter.send(sink))
        running.may_go_on.set()
        assert left_over(before) == []
        gc.enable()
        dist.barrier()
        exporter.send(sink)
        assert (sink._link, sink._memory, sink._handle, sink._update) == (None, None, None, None)
        return outcome

    error = the_error(run_ranks(check, 2))
    check_weights(running, 2)
    return error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "failed to take .* and what comes with it: found Traceback.*ValueError: no room for these weights"),
        ("die", "worker 1 died|the worker of .* on GPU-1 hung up before it had taken count and what comes with it"),
        ("stall", "the worker of .* on GPU-1 did not take .* within 1 s. Look at the log of the engine"),
        ("finish", "these weights cannot be finished"),
    ],
)
def test_a_worker_that_fails(fault, message, tmp_path):
    def lose_patience(sink: FileIPC) -> None:
        if fault == "stall":
            before_call(sink, "_send", lambda: setattr(sink._link, "_timeout", 1.0), number=1)

    with engine(2) as running:
        running.set_fault(1, fault)
        kind = "sglang" if fault == "raise" else "vllm"
        error, text = send_with_fault(running, tmp_path, engine=kind, inject=lose_patience)
    assert error == "SinkError"
    assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("/collective_rpc", "vllm"),
        ("/update_weights_from_ipc", "sglang"),
        ("/pause", "vllm"),
        ("/resume", "vllm"),
        ("/reset_prefix_cache", "vllm"),
    ],
)
def test_a_request_that_is_refused(route, kind, tmp_path):
    with engine(2) as running:
        running.refused.add(route)
        error, text = send_with_fault(running, tmp_path, engine=kind, pause="abort")
        assert error == "SinkError"
        assert f"POST {running.url}{route} was refused: found HTTP 500: " in text
        assert "CUDA ran out of luck" in text


def test_an_engine_that_has_no_weights_but_says_so(tmp_path):
    with engine(2) as running:
        running.is_idle = True
        error, text = send_with_fault(running, tmp_path)
    assert error == "SinkError"
    assert re.search("the engine says that it is done, but the worker of vllm on GPU-0 did not connect", text)


def test_an_engine_without_workers_on_these_gpus(tmp_path):
    def check() -> Outcome:
        sink = FileIPC(running.url, tmp_path, engine="vllm", timeout=1)
        return outcome_of(lambda: Exporter(shard(tiny(), "1d", 2)).send(sink))

    with engine(1) as running:
        error, text = the_error(run_ranks(check, 2))
    assert error == "SinkError"
    assert "did not connect" in text
    assert "--worker-extension-cls checkpoint_engine.worker.VllmColocateWorkerExtension" in text


@pytest.mark.parametrize(("name", "rank"), [("embed.weight", 1), ("two_rows", 0), ("table", 1)])
def test_a_rank_that_raises_sends_the_workers_home(name, rank, tmp_path):
    def inject(sink: FileIPC) -> None:
        write, is_armed = sink.write, dist.get_rank() == rank

        def failing(piece: Any) -> None:
            nonlocal is_armed
            if is_armed and piece.info.name == name:
                is_armed = False
                raise ValueError("out of luck")
            write(piece)

        sink.write = failing  # type: ignore[method-assign]

    with engine(2) as running:
        _, text = send_with_fault(running, tmp_path, inject=inject)
    assert "out of luck" in text


def test_what_engines_are_told(tmp_path):
    def update(kind: str) -> None:
        sink = FileIPC(running.url, tmp_path, engine=kind, pause="keep" if kind == "vllm" else "retract", timeout=60)
        exporter = Exporter(shard(tiny(), "1d", 2))
        exporter.send(sink)
        sink.version = "step-7"
        exporter.send(sink)

    with engine(2) as running:
        run_ranks(update, 2, "vllm")
        routes = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"]
        routes += ["/reset_encoder_cache", "/update_weight_version", "/resume"]
        assert running.routes() == 2 * routes
        bodies = [body for route, body in running.requests if route == "/update_weight_version"]
        assert bodies == [{"new_version": "1"}, {"new_version": "step-7"}]
        running.requests.clear()
        run_ranks(update, 2, "sglang")
        assert running.routes() == 2 * ["/pause_generation", "/update_weights_from_ipc", "/continue_generation"]
        told = [body for route, body in running.requests if route == "/update_weights_from_ipc"]
        assert [(body["weight_version"], body["flush_cache"]) for body in told] == [("1", True), ("step-7", True)]
        assert set(told[0]["zmq_handles"]) == {"GPU-0", "GPU-1"}
        assert told[0]["zmq_handles"] != told[1]["zmq_handles"]
        assert running.requests[0][1] == {"mode": "retract"}


def test_older_engines_lack_routes_that_nobody_asked_for(tmp_path):
    def update(version: str | None) -> Outcome:
        sink = FileIPC(running.url, tmp_path, engine="vllm", version=version, timeout=60)
        exporter = Exporter(shard(tiny(), "1d", 2))
        return outcome_of(lambda: exporter.send(sink))

    with engine(2) as running:
        running.missing = {"/reset_encoder_cache", "/update_weight_version"}
        assert [outcome.kind for outcome in run_ranks(update, 2, None)] == ["ok", "ok"]
        _, text = the_error(run_ranks(update, 2, "step-7"))
        assert "/update_weight_version was refused: found HTTP 404" in text


def test_an_engine_with_weights_of_two_updates_stays_paused_until_one_succeeds(tmp_path):
    def check() -> list[str]:
        sink = FileIPC(running.url, tmp_path, engine="vllm", pause="abort", bucket_bytes=1, timeout=60)
        exporter, connect, kinds = Exporter(shard(tiny(), "1d", 2)), sink._connect, []
        for is_early in (True, False, True, False, True):

            def fail(*arguments: Any, is_early: bool = is_early) -> None:
                if is_early:
                    raise ValueError("out of luck")
                connect(*arguments)

            sink._connect = fail  # type: ignore[assignment,method-assign]
            kinds.append(outcome_of(lambda: exporter.send(sink)).kind)
        return kinds

    with engine(2) as running:
        running.set_fault(1, "raise")
        assert run_ranks(check, 2) == [["RankError", "SinkError", "RankError", "ok", "RankError"]] * 2
        told = [route for route in running.routes() if route in {"/pause?mode=abort", "/resume"}]
    pause, resume = "/pause?mode=abort", "/resume"
    assert told == [pause, resume, pause, pause, pause, resume, pause, resume]


def test_several_ranks_on_one_gpu(tmp_path, monkeypatch):
    def check() -> Outcome:
        sink = FileIPC("http://127.0.0.1:1", tmp_path, engine="vllm")
        return outcome_of(lambda: Exporter(shard(tiny(), "1d", 2)).send(sink))

    monkeypatch.setattr(FileIPC, "_device_key", lambda _: "GPU-7")
    error, text = the_error(run_ranks(check, 2))
    assert error == "UsageError"
    assert "several ranks on one GPU: found GPU-7" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": "http://a:1", "engine": "tgi"}, "no such engine: expected vllm or sglang, found 'tgi'"),
        ({"urls": [], "engine": "vllm"}, "no servers of an engine"),
        ({"urls": ["http://a:1", "http://A:1/"], "engine": "vllm"}, "no servers of an engine.*each once"),
        ({"urls": "a:1", "engine": "vllm"}, "no URL of a server"),
        (
            {"urls": "http://a:1", "engine": "vllm", "pause": "retract"},
            "expected abort, wait, keep or None, found 'ret",
        ),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(UsageError, match=message):
        IPC(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tensors_that_are_on_no_gpu():
    with pytest.raises(UsageError, match="no GPU to share with an engine"):
        Exporter(tiny()).send(IPC("http://127.0.0.1:1", engine="vllm"))


@pytest.mark.parametrize(("route", "is_resumed"), [("/pause", True), ("/collective_rpc", False), ("/resume", False)])
def test_an_engine_with_weights_of_both_stays_paused(route, is_resumed, tmp_path):
    def check() -> Outcome:
        sink = FileIPC(running.url, tmp_path, engine="vllm", pause="wait", timeout=60)
        exporter = Exporter(shard(tiny(), "1d", 2))
        return outcome_of(lambda: exporter.send(sink))

    with engine(2) as running:
        running.refused.add(route)
        the_error(run_ranks(check, 2))
        assert (running.routes()[-1] == "/resume" and running.routes().count("/resume") == 1) == (
            is_resumed or route == "/resume"
        )
