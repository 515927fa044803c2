"""Errors and interrupts on one rank or several."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import StoreKind, run_ranks

from fsdp_export.errors import ExportError, RankError, SinkError
from fsdp_export.fence import Fence, Operation
from fsdp_export.fence import operation as operation_module
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


def run(fence: Fence, body: Callable[[Operation], object]) -> str:
    with fence.operation("save") as operation:
        return str(body(operation))


def attempt(fence: Fence, body: Callable[[Operation], object]) -> Outcome:
    """Run a body in an operation; the ranks are then shown to be in step again, and so is their process group."""
    try:
        outcome = Outcome("ok", run(fence, body))
    except BaseException as error:  # noqa: BLE001  an interrupt is an outcome
        outcome = Outcome(type(error).__name__, str(error), type(error.__cause__).__name__ if error.__cause__ else "")
    with fence.operation("save again") as operation:
        values = operation.agree(f"{dist.get_rank()}")
    total = torch.ones(())
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    return outcome._replace(next_values=tuple(values))


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
def test_a_foreign_exception_becomes_a_rank_error_with_its_type(store: StoreKind) -> None:
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


@pytest.mark.parametrize("interrupted", [0, 1], ids=["lead", "other"])
def test_an_interrupted_rank_does_not_wait_for_a_busy_one(interrupted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_module, "PATIENCE_SECONDS", 600.0)
    has_ended = multiprocessing.get_context("fork").Event()

    def on_rank() -> str:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() == interrupted:
                raise KeyboardInterrupt
            if dist.get_rank() == 2:
                has_ended.wait()
            operation.agree()

        with pytest.raises((KeyboardInterrupt, RankError)) as caught:
            run(fence_of_all(), body)
        if dist.get_rank() == interrupted:
            has_ended.set()
        dist.barrier()
        return caught.typename

    kinds = run_ranks(on_rank, 3)
    assert kinds.pop(interrupted) == "KeyboardInterrupt"
    assert kinds == ["RankError"] * 2


def test_a_lead_interrupted_before_it_writes_a_verdict_is_heard_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(board: Board, key: str, value: object, original: Callable[..., None] = Board.write) -> None:
        if key == "verdict" and value == [1, (1, [""] * 3), None]:
            raise KeyboardInterrupt
        original(board, key, value)

    def on_rank() -> Outcome:
        with monkeypatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(Board, "write", write)
            return attempt(fence_of_all(), lambda operation: operation.agree())

    lead, *others = run_ranks(on_rank, 3)
    assert lead.kind == "KeyboardInterrupt"
    assert {outcome[:2] for outcome in others} == {("RankError", f"rank 0 ({HOST}): interrupted by KeyboardInterrupt")}


def test_a_rank_that_reads_late_still_sees_that_the_others_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would wait for it inside of the collective that comes next."""

    def read_late(board: Board, key: str, original: Callable[..., object] = Board.read) -> object:
        if key == "verdict":
            time.sleep(0.5)
        return original(board, key)

    def on_rank() -> list[float]:
        sums, started = [], []

        def body(operation: Operation) -> None:
            operation.agree()
            sums.append(torch.ones(()))
            started.append(dist.all_reduce(sums[0], async_op=True))
            if dist.get_rank() == 0:
                raise SinkError("full")
            operation.agree()

        if dist.get_rank() == 2:
            monkeypatch.setattr(Board, "read", read_late)
        with pytest.raises(SinkError):
            run(fence_of_all(), body)
        for work in started:
            work.wait()
        return [float(total) for total in sums]

    assert run_ranks(on_rank, 3) == [[3.0]] * 3


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
            if not swallows:
                raise ValueError("cannot clean up") from error
        return None

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
            time.sleep(3)
        if dist.get_rank() == 2:
            raise SinkError("disk full")
        return operation.agree()

    for outcome in run_ranks(lambda: attempt(fence_of_all(), body), 3):
        assert outcome[:2] == ("SinkError", f"rank 2 ({HOST}): disk full")
        assert outcome.next_values == ("0", "1", "2")


@pytest.mark.parametrize("is_same", [True, False], ids=["same-fence", "other-fence"])
def test_a_nested_operation_is_refused_on_all_ranks(is_same: bool) -> None:
    def on_rank() -> Outcome:
        fence = fence_of_all()
        inner = fence if is_same else fence_of_all()
        return attempt(fence, lambda _: inner.operation("load").__enter__())

    for outcome in run_ranks(on_rank, 2):
        assert outcome.kind == "UsageError"
        assert outcome.text.startswith("load was called within another export")
        assert outcome.next_values == ("0", "1")
