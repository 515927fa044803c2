"""What ranks that all go on agree on, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import StoreKind, run_ranks

from fsdp_export.compat import default_store
from fsdp_export.errors import SinkError, UsageError
from fsdp_export.fence import Fence
from fsdp_export.fence.board import Board


def fence_of_all(**options: Any) -> Fence:
    return Fence(range(dist.get_world_size()), dist.get_rank(), **options)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_values_come_in_the_order_of_ranks(store: StoreKind) -> None:
    def on_rank() -> list[list[str]]:
        with fence_of_all().operation("save") as operation:
            return [operation.agree(f"{dist.get_rank()} says {number} é\n\0") for number in range(5)]

    expected = [[f"{rank} says {number} é\n\0" for rank in range(3)] for number in range(5)]
    assert run_ranks(on_rank, 3, store=store) == [expected] * 3


def test_some_ranks_export_while_others_do_not() -> None:
    def on_rank() -> tuple[bool, list[str]] | None:
        rank = dist.get_rank()
        if rank == 1:
            return None
        fence = Fence((3, 0, 2), rank)
        with fence.operation("save") as operation:
            return fence.is_lead, operation.agree(str(rank))

    values = ["3", "0", "2"]
    assert run_ranks(on_rank, 4) == [(False, values), None, (False, values), (True, values)]


def test_a_store_may_be_given() -> None:
    store = dist.HashStore()
    results: dict[int, list[str]] = {}

    def on_rank(rank: int) -> None:
        with Fence((0, 1), rank, store=store).operation("save") as operation:
            results[rank] = operation.agree(str(rank))

    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: ["0", "1"], 1: ["0", "1"]}


def test_a_rank_that_takes_no_part_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one of ranks 0, 1, found rank 5"):
        Fence((0, 1), 5)


def test_wait_returns_when_it_is_done() -> None:
    def on_rank() -> int:
        calls = 0

        def is_done() -> bool:
            nonlocal calls
            calls += 1
            return calls > 100

        with fence_of_all().operation("save") as operation:
            operation.wait(is_done)
        return calls

    assert run_ranks(on_rank, 2) == [101, 101]


@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
def test_rank_0_leaves_last_as_it_may_host_the_store(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr("fsdp_export.fence.operation.PATIENCE_SECONDS", 30.0)

    def slow_read(board: Board, key: str, read: Callable[[Board, str], Any] = Board.read) -> Any:
        time.sleep(0.2)
        return read(board, key)

    def on_rank() -> str:
        fence = fence_of_all()
        if dist.get_rank():
            monkeypatch.setattr(Board, "read", slow_read)
        with pytest.raises(SinkError) if fails else contextlib.nullcontext(), fence.operation("save") as operation:
            operation.agree()
            if fails and dist.get_rank() == 2:
                raise SinkError("disk full")
        if dist.get_rank() == 0:
            os._exit(0)
        return "left"

    assert run_ranks(on_rank, 3, store="tcp", expect_death={0}) == [None, "left", "left"]


def test_keys_do_not_pile_up() -> None:
    def on_rank() -> list[int]:
        fence = fence_of_all()
        counts = []
        for _ in range(3):
            for fails in (True, False) * 20:
                with (
                    pytest.raises(SinkError) if fails else contextlib.nullcontext(),
                    fence.operation("save") as operation,
                ):
                    for _ in range(10):
                        operation.agree("value")
                    if fails:
                        raise SinkError("full")
            counts.append(default_store().num_keys())
        return counts

    counts = run_ranks(on_rank, 2, store="tcp")[0]
    assert len(set(counts)) == 1


def test_a_long_operation_keeps_few_keys() -> None:
    def on_rank() -> int:
        keys = default_store()
        with fence_of_all().operation("save") as operation:
            operation.agree()
            before = keys.num_keys()
            for _ in range(3000):
                operation.agree()
            time.sleep(0.5)
            operation.agree()
            return keys.num_keys() - before

    assert run_ranks(on_rank, 2, store="tcp")[0] < 10


def test_one_rank_alone_needs_no_store_and_no_thread() -> None:
    threads = threading.active_count()
    fence = Fence((5,), 5)
    with fence.operation("save") as operation:
        assert operation.agree("value") == ["value"]
        operation.check()
        answers = iter([False, False, True])
        operation.wait(lambda: next(answers))
        assert threading.active_count() == threads
    assert (fence.index, fence.size, fence.is_lead) == (0, 1, True)


@pytest.mark.parametrize(
    "error", [SinkError("full"), ValueError("x"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_one_rank_alone_raises_what_happened(error: BaseException) -> None:
    fence = Fence((0,), 0)
    with pytest.raises(type(error)) as caught, fence.operation("save"):
        raise error
    assert caught.value is error
    assert error.__cause__ is None


def test_operations_of_a_fence_do_not_overlap() -> None:
    fence = Fence((0,), 0)
    with fence.operation("save"), pytest.raises(UsageError, match="load was called within another export"):  # noqa: SIM117
        with fence.operation("load"):
            pass
    with fence.operation("load"):
        pass
