from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from fsdp_export.compat import default_store
from fsdp_export.errors import ExportError, SinkError, UsageError
from fsdp_export.fence import Fence, Operation
from fsdp_export.fence.board import Board

HOST = socket.gethostname()


class Outcome(NamedTuple):
    """What came out of an operation on one rank, as far as it can be pickled."""

    kind: str
    text: str
    cause: str = ""
    next_values: tuple[str, ...] = ()


def fence_of_all(**options: Any) -> Fence:
    return Fence(range(dist.get_world_size()), dist.get_rank(), **options)


def attempt(fence: Fence, body: Callable[[Operation], object]) -> Outcome:
    """Run a body in an operation; the ranks are then shown to be in step again, and so is their process group."""
    try:
        with fence.operation("save") as operation:
            outcome = Outcome("ok", str(body(operation)))
    except BaseException as error:  # noqa: BLE001  an interrupt is an outcome
        outcome = Outcome(type(error).__name__, str(error), type(error.__cause__).__name__ if error.__cause__ else "")
    with fence.operation("save again") as operation:
        values = operation.agree(f"{dist.get_rank()}")
    total = torch.ones(())
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    return outcome._replace(next_values=tuple(values))


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_values_come_in_the_order_of_ranks(store: Any) -> None:
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
    with pytest.raises(UsageError, match=r"expected one of ranks \(0, 1\), found rank 5"):
        Fence((0, 1), 5)


def agree(operation: Operation) -> None:
    operation.agree("value")


def wait(operation: Operation) -> None:
    operation.wait(lambda: False)


def check(operation: Operation) -> None:
    while True:
        operation.check()
        time.sleep(0.01)


def end(_: Operation) -> None:
    pass


@pytest.mark.parametrize("go_on", [agree, wait, check, end])
@pytest.mark.parametrize("failing", [0, 1, 2], ids=["lead", "middle", "last"])
def test_an_error_on_one_rank_is_raised_on_all(failing: int, go_on: Callable[[Operation], None]) -> None:
    def body(operation: Operation) -> None:
        operation.agree("before")
        if dist.get_rank() == failing:
            raise SinkError("disk full", file="model.safetensors", fix="Free some space")
        go_on(operation)

    text = f"rank {failing} ({HOST}): disk full in model.safetensors. Free some space."
    for rank, outcome in enumerate(run_ranks(lambda: attempt(fence_of_all(), body), 3)):
        assert outcome == Outcome("SinkError", text, "SinkError" if rank == failing else "", ("0", "1", "2"))


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_a_foreign_exception_becomes_a_rank_error_with_its_type(store: Any) -> None:
    def body(operation: Operation) -> object:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("by nothing")
        return operation.agree()

    text = f"rank 1 ({HOST}): ZeroDivisionError: by nothing"
    first, second = run_ranks(lambda: attempt(fence_of_all(), body), 2, store=store)
    assert first == Outcome("RankError", text, "", ("0", "1"))
    assert second == Outcome("RankError", text, "ZeroDivisionError", ("0", "1"))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param(["", "no", "no"], f"ranks 1, 2 (host {HOST}): no", id="two-the-same"),
        pytest.param(["x", "y", "z"], f"rank 0 ({HOST}): x (and 2 more ranks failed)", id="all-different"),
        pytest.param(["no", "no", "no"], "no", id="every-rank-the-same"),
    ],
)
def test_several_errors_are_joined(messages: list[str], expected: str) -> None:
    def body(operation: Operation) -> object:
        message = messages[dist.get_rank()]
        if message:
            raise SinkError(message)
        return operation.agree()

    outcomes = run_ranks(lambda: attempt(fence_of_all(), body), 3)
    assert {(outcome.kind, outcome.text) for outcome in outcomes} == {("SinkError", expected)}


@pytest.mark.parametrize("failing", [0, 1], ids=["lead", "other"])
@pytest.mark.parametrize(
    ("interrupt", "said"),
    [
        pytest.param(KeyboardInterrupt, "interrupted by KeyboardInterrupt", id="ctrl-c"),
        pytest.param(SystemExit, "interrupted by SystemExit", id="exit"),
        pytest.param(GeneratorExit, "stopped early", id="generator-closed"),
    ],
)
def test_an_interrupt_stays_what_it_is_where_it_happens(
    failing: int, interrupt: type[BaseException], said: str
) -> None:
    def body(operation: Operation) -> object:
        operation.agree()
        if dist.get_rank() == failing:
            raise interrupt
        return operation.agree()

    for rank, outcome in enumerate(run_ranks(lambda: attempt(fence_of_all(), body), 3)):
        if rank == failing:
            assert outcome.kind == interrupt.__name__
        else:
            assert outcome[:2] == ("RankError", f"rank {failing} ({HOST}): {said}")
        assert outcome.next_values == ("0", "1", "2")


def test_an_interrupt_on_every_rank_is_nobodys_error() -> None:
    def body(operation: Operation) -> object:
        operation.agree()
        raise GeneratorExit

    assert [outcome.kind for outcome in run_ranks(lambda: attempt(fence_of_all(), body), 3)] == ["GeneratorExit"] * 3


@pytest.mark.parametrize("swallows", [True, False], ids=["swallowed", "wrapped"])
def test_a_body_cannot_hide_the_verdict(swallows: bool) -> None:
    def body(operation: Operation) -> object:
        if dist.get_rank() == 0:
            raise SinkError("disk full")
        try:
            return operation.agree()
        except ExportError as error:
            if swallows:
                return "nothing happened"
            raise ValueError("cannot clean up") from error

    outcomes = run_ranks(lambda: attempt(fence_of_all(), body), 2)
    assert {outcome[:2] for outcome in outcomes} == {("SinkError", f"rank 0 ({HOST}): disk full")}


@pytest.mark.parametrize("swallows", [True, False], ids=["swallowed", "wrapped"])
def test_a_body_cannot_hide_what_it_noticed(swallows: bool) -> None:
    def body(operation: Operation) -> object:
        if dist.get_rank() == 1:
            raise SinkError("disk full")
        try:
            operation.wait(lambda: False)
        except ExportError as error:
            if swallows:
                return "nothing happened"
            raise ValueError("cannot clean up") from error

    outcomes = run_ranks(lambda: attempt(fence_of_all(), body), 2)
    assert {outcome[:2] for outcome in outcomes} == {("SinkError", f"rank 1 ({HOST}): disk full")}


@pytest.mark.parametrize("agreeing", [0, 1], ids=["lead", "other"])
def test_ranks_that_leave_step_are_told(agreeing: int) -> None:
    def body(operation: Operation) -> object:
        return operation.agree() if dist.get_rank() == agreeing else None

    for outcome in run_ranks(lambda: attempt(fence_of_all(), body), 2):
        assert outcome.kind == "RankError"
        assert "AssertionError: some ranks ended where others go on" in outcome.text


def test_a_slow_rank_finds_the_verdict_that_others_raised_already() -> None:
    def body(operation: Operation) -> object:
        operation.agree()
        if dist.get_rank() == 1:
            time.sleep(4)
        if dist.get_rank() == 2:
            raise SinkError("disk full")
        return operation.agree()

    for outcome in run_ranks(lambda: attempt(fence_of_all(), body), 3):
        assert outcome[:2] == ("SinkError", f"rank 2 ({HOST}): disk full")
        assert outcome.next_values == ("0", "1", "2")


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

    assert run_ranks(on_rank, 3, expect_death={0}) == [None, "left", "left"]


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

    counts = run_ranks(on_rank, 2)[0]
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

    assert run_ranks(on_rank, 2)[0] < 10


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


def test_a_nested_operation_is_refused_on_all_ranks() -> None:
    def on_rank() -> Outcome:
        fence = fence_of_all()
        return attempt(fence, lambda _: fence.operation("load").__enter__())

    for outcome in run_ranks(on_rank, 2):
        assert outcome.kind == "UsageError"
        assert outcome.text.startswith("load was called within another export")
