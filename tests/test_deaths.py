"""Ranks that die, are slow, never call or end in the middle: the others go on, or know in seconds who it was."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from faults import (
    NUM_RANKS,
    Outcome,
    before_call,
    check_complete,
    export_again,
    layered,
    make_old_export,
    outcome_of,
    the_error,
)
from models import shard
from publish_faults import tree
from ranks import run_ranks

from fsdp_export import Exporter, collectives, save_checkpoint
from fsdp_export.fence import board, heartbeat
from fsdp_export.sinks.files import FileSink

HOST = socket.gethostname()
HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier export."""
    make_old_export(tmp_path / "export")
    return tmp_path / "export"


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank count as dead after 1.5 seconds of silence."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.15)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def export_with_death(folder: Path, victim: int, inject: Any, layout: str, **options: Any) -> tuple[str, str]:
    """Export while a rank dies, find the earlier export intact, and export again; return the error of the others."""
    before = tree(folder)

    def on_rank() -> Outcome:
        exporter = Exporter(shard(layered(), layout, NUM_RANKS), bucket_bytes=256)
        sink = FileSink(folder)
        if dist.get_rank() == victim:
            inject(exporter, sink)
        return outcome_of(lambda: exporter.send(sink))

    outcomes = run_ranks(on_rank, NUM_RANKS, expect_death={victim}, **options)
    assert outcomes.pop(victim) is None
    after = tree(folder)
    if victim == 0:
        # Nobody is left who could clean up; the next export does.
        after = {name: content for name, content in after.items() if not name.startswith(".fsdp-export-writing")}
    assert after == before
    export_again(Exporter(layered()), FileSink(folder))
    return the_error(outcomes)


@pytest.mark.usefixtures("is_impatient")
@pytest.mark.parametrize(
    ("layout", "number", "store", "victim"),
    [
        pytest.param("1d", 0, "tcp", 0, id="first-piece-first-rank"),
        pytest.param("1d", 3, "tcp", 1, id="held-middle-rank"),
        pytest.param("1d", 3, "file", 0, id="held-first-rank-without-the-store"),
        pytest.param("dim1", 4, "tcp", 0, id="gathered-first-rank"),
        pytest.param("dim1", 4, "tcp", 2, id="gathered-last-rank"),
        pytest.param("dim1", 4, "file", 0, id="gathered-first-rank-without-the-store"),
    ],
)
def test_a_rank_killed_in_write(folder, layout, number, store, victim):
    kind, text = export_with_death(
        folder, victim, lambda _, sink: before_call(sink, "write", die, number=number), layout, store=store
    )
    assert kind == "RankError"
    if victim == 0 and store == "tcp":
        assert "the process that hosts it, rank 0 or the launcher, is gone" in text
    else:
        assert text.startswith(f"rank {victim} ({HOST}): no sign of life for 1.5 s, the process died or is stuck")


@pytest.mark.usefixtures("is_impatient")
@pytest.mark.parametrize(("number", "victim"), [(0, 0), (0, 2), (2, 1)])
def test_a_rank_killed_while_others_wait_in_a_gather(folder, number, victim):
    kind, text = export_with_death(
        folder, victim, lambda *_: before_call(collectives, "all_gather_into", die, number=number), "dim1"
    )
    assert kind == "RankError"
    assert f"rank {victim}" in text


@pytest.mark.parametrize("num_saves", [0, 1])
def test_the_first_rank_killed_between_two_saves(folder, num_saves):
    def on_rank() -> Outcome:
        model = shard(layered(), "1d", NUM_RANKS)
        for _ in range(num_saves):
            save_checkpoint(model, folder)
        dist.barrier()
        if dist.get_rank() == 0:
            die()
        time.sleep(0.5)
        return outcome_of(lambda: save_checkpoint(model, folder))

    kind, text = the_error(run_ranks(on_rank, NUM_RANKS, store="tcp", expect_death={0})[1:])
    assert kind == "RankError"
    assert "the process that hosts it, rank 0 or the launcher, is gone" in text


@pytest.mark.slow
def test_a_rank_killed_in_write_is_known_in_seconds(folder):
    kind, text = export_with_death(folder, 2, lambda _, sink: before_call(sink, "write", die, number=3), "1d")
    assert (kind, text) == ("RankError", f"rank 2 ({HOST}): no sign of life for 10 s, the process died or is stuck")


def export_slowly(exporter: Exporter, sink: FileSink, pause: Callable[[], object]) -> None:
    before_call(sink, "write", pause, number=1)
    exporter.send(sink)


def loop_slowly(exporter: Exporter, sink: FileSink, pause: Callable[[], object]) -> None:
    for index, _ in enumerate(exporter.tensors()):
        if index == 1:
            pause()


@pytest.mark.parametrize(
    ("layout", "export", "slow", "seconds", "pg_timeout"),
    [
        pytest.param("1d", export_slowly, 0, 6, 3, id="held"),
        pytest.param("dim1", export_slowly, 1, 6, 3, id="gathered"),
        pytest.param("dim1", loop_slowly, 1, 6, 3, id="iterated"),
        pytest.param("dim1", export_slowly, 0, 60, 10, id="a-minute", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_kills_nobody(folder, monkeypatch, layout, export, slow, seconds, pg_timeout):
    if seconds < 60:
        monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.15)

    is_over = multiprocessing.get_context("fork").Event()

    def pause() -> None:
        if dist.get_rank() == slow:
            time.sleep(seconds)
            is_over.set()

    def on_rank() -> Outcome:
        exporter = Exporter(shard(layered(), layout, 2), bucket_bytes=256)
        sink = FileSink(folder)
        outcome = outcome_of(lambda: export(exporter, sink, pause))
        assert is_over.is_set()
        export_again(exporter, FileSink(folder))
        return outcome

    outcomes = run_ranks(on_rank, 2, pg_timeout=pg_timeout, timeout=seconds + 50)
    assert outcomes == [("ok", "")] * 2


@pytest.mark.parametrize("caller", range(NUM_RANKS))
def test_a_save_that_only_one_rank_calls(folder, caller, monkeypatch, caplog):
    monkeypatch.setattr(board, "WARNING_SECONDS", 0.3)
    before = tree(folder)

    def on_rank() -> tuple[Outcome, list[str]] | None:
        model = shard(layered(), "1d", NUM_RANKS)
        result = None
        if dist.get_rank() == caller:
            outcome = outcome_of(lambda: save_checkpoint(model, folder, timeout=1))
            result = outcome, caplog.messages
        dist.barrier()
        assert tree(folder) == before
        dist.barrier()
        if dist.get_rank() and not caller:
            # A rank that is only late is told what the others were; then all are in step again.
            assert outcome_of(lambda: save_checkpoint(model, folder)).kind == "RankError"
        export_again(Exporter(model), FileSink(folder))
        return result

    with caplog.at_level(logging.WARNING, logger="fsdp_export"):
        outcome, messages = run_ranks(on_rank, NUM_RANKS)[caller]
    names = "ranks 1, 2" if caller == 0 else "rank 0"
    assert messages == [f"Exporter.send waits for {names} to call it too"]
    text = f"Exporter.send must be called on every rank, but {names} did not call it within 1 s"
    assert outcome == ("RankError", text)


def test_a_script_that_ends_in_the_middle_of_an_export(tmp_path):
    scripts = [
        subprocess.Popen(
            [sys.executable, str(HERE / "leave_early.py"), str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        waiting, ending = (script.communicate(timeout=100) for script in scripts)
    finally:
        for script in scripts:
            script.kill()
    # Gloo now and then aborts a program that left its group standing.
    assert scripts[0].returncode == 0 < abs(scripts[1].returncode), (waiting, ending)
    assert re.fullmatch(rf"rank 1 \({HOST}\): (the program ended within the export|stopped early)\n", waiting[0])
    assert "the script ends" in ending[1]
    check_complete(tmp_path / "export")
