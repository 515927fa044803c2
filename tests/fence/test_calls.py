"""Ranks that do not call, call late, or call something else."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from ranks import StoreKind, run_ranks

from fsdp_export.compat import default_store
from fsdp_export.errors import ExportError
from fsdp_export.fence import Fence, board

HOST = socket.gethostname()


def fence_of_all(**options: Any) -> Fence:
    return Fence(range(dist.get_world_size()), dist.get_rank(), **options)


def save(fence: Fence, what: str = "save") -> str:
    """Run an operation, and say how it went."""
    try:
        with fence.operation(what) as operation:
            return ",".join(operation.agree(str(dist.get_rank())))
    except ExportError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("store", ["tcp", "file"])
@pytest.mark.parametrize(
    ("absent", "names"),
    [
        pytest.param((2,), "rank 2", id="last"),
        pytest.param((1, 2), "ranks 1, 2", id="all-but-the-lead"),
        pytest.param((0,), "rank 0", id="lead"),
    ],
)
def test_a_rank_that_never_calls_is_named(absent: tuple[int, ...], names: str, store: StoreKind) -> None:
    def on_rank() -> str:
        result = save(fence_of_all(timeout=1.5)) if dist.get_rank() not in absent else "absent"
        dist.barrier()
        return result

    text = f"RankError: save must be called on every rank, but {names} did not call it within 1.5 s"
    for rank, result in enumerate(run_ranks(on_rank, 3, store=store)):
        assert result == ("absent" if rank in absent else text)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_a_late_rank_raises_the_same_and_the_next_call_lines_up(store: StoreKind) -> None:
    def on_rank() -> list[str]:
        hasty, fence = fence_of_all(timeout=1.5), fence_of_all()
        if dist.get_rank() == 1:
            dist.barrier()
            first = save(hasty)
        else:
            first = save(hasty)
            dist.barrier()
        dist.barrier()
        return [first, save(fence), save(fence)]

    text = "RankError: save must be called on every rank, but rank 1 did not call it within 1.5 s"
    assert run_ranks(on_rank, 3, store=store) == [[text, "0,1,2", "0,1,2"]] * 3


def test_calls_in_vain_leave_no_keys() -> None:
    def on_rank() -> list[int]:
        hasty, fence = fence_of_all(timeout=0.5), fence_of_all()
        counts = []
        for _ in range(3):
            if dist.get_rank() == 1:
                dist.barrier()
            assert save(hasty).startswith("RankError")
            if dist.get_rank() == 0:
                dist.barrier()
            dist.barrier()
            assert save(fence) == "0,1"
            counts.append(default_store().num_keys())
        return counts

    assert len(set(run_ranks(on_rank, 2, store="tcp")[0])) == 1


def test_ranks_that_gave_up_waiting_for_the_lead_line_up_again() -> None:
    def on_rank() -> list[str]:
        hasty, fence = fence_of_all(timeout=0.8), fence_of_all()
        results = [save(hasty), save(hasty)] if dist.get_rank() else []
        dist.barrier()
        return [*results, save(fence), save(fence)]

    text = "RankError: save must be called on every rank, but rank 0 did not call it within 0.8 s"
    lead, *others = run_ranks(on_rank, 3)
    assert lead == ["0,1,2"] * 2
    assert others == [[text, text, "0,1,2", "0,1,2"]] * 2


def test_a_lead_that_went_on_is_met_at_its_newest_call() -> None:
    def on_rank() -> list[str]:
        hasty, fence = fence_of_all(timeout=0.5), fence_of_all()
        if dist.get_rank() == 1:
            assert fence._link is not None
            while fence._link.board.read("number") != 2:
                time.sleep(0.01)
            return [save(fence), save(fence)]
        return [save(hasty), save(fence), save(fence)]

    text = "RankError: save must be called on every rank, but rank 1 did not call it within 0.5 s"
    assert run_ranks(on_rank, 2) == [[text, "0,1", "0,1"], ["0,1", "0,1"]]


@pytest.mark.parametrize("interrupted", [0, 1], ids=["lead", "other"])
def test_an_interrupt_while_ranks_are_waited_for_reaches_those_that_called(interrupted: int) -> None:
    def on_rank() -> str:
        fence = fence_of_all()
        if dist.get_rank() == 2:
            dist.barrier()
            return save(fence)
        try:
            if dist.get_rank() == interrupted:
                threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            return save(fence)
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            dist.barrier()

    results = run_ranks(on_rank, 3)
    assert results.pop(interrupted) == "interrupted"
    # Rank 2 comes late and finds the verdict.
    assert results == [f"RankError: rank {interrupted}: interrupted by KeyboardInterrupt"] * 2


def test_waiting_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "WARNING_SECONDS", 1.0)
    logged = multiprocessing.get_context("fork").Semaphore(0)

    def on_rank() -> list[str]:
        messages: list[str] = []

        def emit(record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            logged.release()

        handler = logging.Handler()
        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("fsdp_export").addHandler(handler)
        fence = fence_of_all()
        for late, num_waiting in ((0, 2), (1, 1)):
            if dist.get_rank() == late:
                for _ in range(num_waiting):
                    logged.acquire()
            assert save(fence) == "0,1,2"
        return messages

    lead, middle, last = run_ranks(on_rank, 3)
    assert lead == ["save waits for rank 1 to call it too"]
    assert middle == last == ["save waits for rank 0 to call it too"]


def test_ranks_that_call_different_things_are_told() -> None:
    def on_rank() -> list[str]:
        fence = fence_of_all()
        return [save(fence, "send" if dist.get_rank() == 2 else "save"), save(fence)]

    text = (
        "DisagreementError: the ranks call different things: "
        f"expected save as on rank 0 ({HOST}), found send on rank 2 ({HOST})"
    )
    assert run_ranks(on_rank, 3) == [[text, "0,1,2"]] * 3


def test_a_new_fence_goes_on_where_the_last_one_ended() -> None:
    def on_rank() -> list[str]:
        # Only one of the ranks makes a new fence for every call.
        fences = [fence_of_all() for _ in range(3)] if dist.get_rank() else [fence_of_all()] * 3
        return [save(fence) for fence in fences]

    assert run_ranks(on_rank, 2) == [["0,1"] * 3] * 2


def test_fences_of_different_ranks_do_not_meet() -> None:
    def on_rank() -> str:
        rank = dist.get_rank()
        return save(Fence((0, 2) if rank % 2 == 0 else (1, 3), rank))

    assert run_ranks(on_rank, 4) == ["0,2", "1,3", "0,2", "1,3"]
