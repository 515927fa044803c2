"""Updates of an engine that stands for a real one, by three ranks: those that go well, and those that fail."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fake_server import FakeServer
from faults import FOREVER, Outcome, outcome_of, the_error
from models import shard, tiny
from ranks import run_ranks
from torch import nn

from fsdp_export import Exporter
from fsdp_export.sinks.broadcasting import BroadcastSink

__all__ = [
    "alone",
    "changed",
    "fail_and_update_again",
    "fail_on_one_rank",
    "lose_patience",
    "slow",
    "update_three_times",
]

NewSink = Callable[[], BroadcastSink]
State = dict[str, Any]


def changed(times: int, model: nn.Module | None = None) -> nn.Module:
    """Add one to all parameters so many times."""
    model = tiny() if model is None else model
    with torch.no_grad():
        for _ in range(times):
            for parameter in model.parameters():
                parameter.add_(1)
    return model


def alone(check: Callable[[], object]) -> None:
    """Run in another process: the threads of gloo and of a store cannot be forked."""
    run_ranks(check, 1)


def lose_patience(sink: BroadcastSink, route: str, number: int = 0) -> None:
    """Let a sink wait no longer than a second for the answer to one request, counted from 0, to each server."""

    def hurried(post: Callable[..., Any], numbers: Iterator[int]) -> Callable[..., Any]:
        def hasty(path: str, *arguments: Any, **options: Any) -> Any:
            if path == f"/{route}" and next(numbers) == number:
                options["timeout"] = 1.0
            return post(path, *arguments, **options)

        return hasty

    for server in sink._servers:
        server.post = hurried(server.post, itertools.count())  # type: ignore[method-assign]


def update_three_times(servers: Sequence[FakeServer], new_sink: NewSink) -> list[list[State]]:
    """Send what a model has, thrice, and change it in between; return the states of all servers after each update."""

    def check() -> list[list[State]]:
        model, sink = shard(tiny(), "1d", 3), new_sink()
        exporter, states = Exporter(model), []
        for _ in range(3):
            exporter.send(sink)
            if sink.num_updates:
                states.append([server.state() for server in servers])
            changed(1, model)
        sink.disconnect()  # type: ignore[attr-defined]
        return states

    states, *others = run_ranks(check, 3)
    assert others == [[], []]
    return states


def fail_and_update_again(
    server: FakeServer, route: str, kind: str, new_sink: NewSink, *, after: int = 0
) -> tuple[str, State, State]:
    """Send to a server that fails, with one message on all ranks, and no wait but for one that stalls; send again.

    Args:
        server: The server; stopped in the end.
        route: The request that fails.
        kind: How it fails.
        new_sink: Makes a sink on every rank.
        after: How many of these requests succeed before that.

    Returns:
        The message; the server's state after the failure, nothing of one that died, and after the second update.
    """
    server.fail(route, kind, after=after)

    def check() -> tuple[Outcome, State, State]:
        sink, is_lead = new_sink(), dist.get_rank() == 0
        if kind == "stall":
            lose_patience(sink, route, after)
        model = shard(tiny(), "1d", 3)
        exporter = Exporter(model)
        outcome = outcome_of(lambda: exporter.send(sink))
        failed = server.state() if is_lead and kind != "die" else {}
        changed(1, model)
        with server.restarted() if is_lead and kind == "die" else nullcontext():
            exporter.send(sink)
            return outcome, failed, server.state() if is_lead else {}

    try:
        outcomes, (failed, *_), (state, *_) = zip(*run_ranks(check, 3), strict=True)
    finally:
        server.stop()
    kind, message = the_error(outcomes)
    assert kind == "SinkError"
    return message, failed, state


def fail_on_one_rank(server: FakeServer, sink_class: type[BroadcastSink], **options: Any) -> State:
    """Let a rank fail in the middle of an update, then send other values; return the server's state in between."""

    def check() -> State:
        class Failing(sink_class):  # type: ignore[misc, valid-type]
            is_failing = True

            def write(self, piece: Any) -> None:
                super().write(piece)
                if self.is_failing and dist.get_rank() == 2 and piece.info.name == "two_rows":
                    raise ValueError("out of luck")

        sink = Failing(server.url, bucket_bytes=1, timeout=FOREVER, **options)
        model = shard(tiny(), "1d", 3)
        exporter = Exporter(model, bucket_bytes=1)
        kind, text = outcome_of(lambda: exporter.send(sink))
        assert kind == "RankError"
        assert "out of luck" in text
        state = server.state() if dist.get_rank() == 0 else {}
        Failing.is_failing = False
        changed(1, model)
        exporter.send(sink)
        return state

    state, *_ = run_ranks(check, 3)
    return state


def slow(server: FakeServer, sink_class: type[BroadcastSink], **options: Any) -> None:
    """Send twice, one tensor after the other and each of them late (trl#7103)."""

    def check() -> None:
        class Slow(sink_class):  # type: ignore[misc, valid-type]
            def _send(self, bucket: Any) -> None:
                time.sleep(0.1)
                super()._send(bucket)

        exporter = Exporter(shard(tiny(), "1d", 3), bucket_bytes=1)
        sink = Slow(server.url, bucket_bytes=1, timeout=60, **options)
        for _ in range(2):
            exporter.send(sink)

    run_ranks(check, 3)
