"""Ranks that die, and ranks that only seem to."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import StoreKind, run_ranks

from fsdp_export.compat import default_store
from fsdp_export.errors import RankError
from fsdp_export.fence import Fence, Operation, heartbeat
from fsdp_export.fence.board import Board
from fsdp_export.fence.file_store import log_of

HOST = socket.gethostname()
REPOSITORY = Path(__file__).parents[2]


def fence_of_all(**options: Any) -> Fence:
    return Fence(range(dist.get_world_size()), dist.get_rank(), **options)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_writing(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process die as soon as a key of its own is in the store."""

    def write(board: Board, key: str, value: object, original: Callable[..., None] = Board.write) -> None:
        original(board, key, value)
        if key == last:
            board.read(key)
            die()

    monkeypatch.setattr(Board, "write", write)


def told(fence: Fence, body: Callable[[Operation], object]) -> RankError:
    """Return the error that comes out of an operation."""

    def run() -> None:
        with fence.operation("save") as operation:
            body(operation)

    with pytest.raises(RankError) as caught:
        run()
    return caught.value


def wait_until_told(operation: Operation) -> None:
    operation.wait(lambda: False)


def meet(operation: Operation) -> None:
    operation.agree()


WAITS = pytest.mark.parametrize("wait", [meet, wait_until_told])
SILENT = "no sign of life for 0.8 s, the process died or is stuck"


@pytest.mark.parametrize(("store", "killed"), [("tcp", 1), ("file", 2)], ids=["tcp-middle", "file-last"])
@WAITS
def test_a_killed_rank_is_named_on_all_others(store: StoreKind, killed: int, wait: Any) -> None:
    def on_rank() -> str:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() == killed:
                die()
            wait(operation)

        return str(told(fence_of_all(), body))

    results = run_ranks(on_rank, 3, store=store, expect_death={killed})
    assert results.pop(killed) is None
    assert results == [f"rank {killed} ({HOST}): {SILENT}"] * 2


def test_several_killed_ranks_are_named_together() -> None:
    def on_rank() -> str:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() in {1, 3}:
                die()
            meet(operation)

        return str(told(fence_of_all(), body))

    text = f"ranks 1, 3 (host {HOST}): {SILENT}"
    assert run_ranks(on_rank, 4, expect_death={1, 3}) == [text, None, text, None]


def test_a_rank_that_says_what_happened_and_dies_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank() -> str:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() == 1:
                raise RankError("disk full")
            # Rank 1 is known to be dead before rank 0 asks for its report.
            time.sleep(1.2)

        if dist.get_rank() == 1:
            die_after_writing("failed", monkeypatch)
        return str(told(fence_of_all(), body))

    text = f"rank 1 ({HOST}): disk full"
    assert run_ranks(on_rank, 3, expect_death={1}) == [text, None, text]


@WAITS
def test_a_killed_lead_is_named_on_all_others(wait: Any) -> None:
    def on_rank() -> str:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() == 0:
                die()
            wait(operation)

        return str(told(fence_of_all(), body))

    text = f"rank 0 ({HOST}): {SILENT}"
    assert run_ranks(on_rank, 3, store="file", expect_death={0}) == [None, text, text]


@WAITS
def test_a_killed_lead_takes_the_store_along(wait: Any) -> None:
    def on_rank() -> list[str]:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() == 0:
                die()
            wait(operation)

        fence = fence_of_all()
        return [str(told(fence, body)), str(told(fence, body))]

    lost = (
        "the connection to the store of the process group broke: "
        "the process that hosts it, rank 0 or the launcher, is gone"
    )
    assert run_ranks(on_rank, 3, store="tcp", expect_death={0}) == [None, [lost] * 2, [lost] * 2]


def test_a_rank_killed_while_others_are_waited_for_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank() -> str | None:
        if dist.get_rank() == 2:
            return None
        if dist.get_rank() == 1:
            die_after_writing("report/1", monkeypatch)
        return str(told(fence_of_all(), meet))

    assert run_ranks(on_rank, 3, expect_death={1}) == [f"rank 1: {SILENT}", None, None]


def test_a_killed_rank_comes_before_those_that_fail_of_it() -> None:
    def on_rank() -> str:
        def body(operation: Operation) -> None:
            operation.agree()
            if dist.get_rank() == 2:
                die()
            dist.barrier()

        error = told(fence_of_all(), body)
        assert isinstance(error.__cause__, RuntimeError)
        return str(error)

    text = f"rank 2 ({HOST}): {SILENT} (and 2 more ranks failed)"
    assert run_ranks(on_rank, 3, expect_death={2}) == [text, text, None]


@pytest.mark.parametrize("slow", [0, 1], ids=["lead", "other"])
def test_a_slow_rank_lives(slow: int) -> None:
    def on_rank() -> list[str]:
        with fence_of_all(timeout=1.5).operation("save") as operation:
            operation.agree()
            if dist.get_rank() == slow:
                time.sleep(3)
            return operation.agree(str(dist.get_rank()))

    assert run_ranks(on_rank, 3) == [["0", "1", "2"]] * 3


def test_a_job_that_was_suspended_goes_on() -> None:
    def on_rank() -> list[str]:
        pids: list[Any] = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 2:
            time.sleep(0.5)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids[:2]:
                    os.kill(pid, number)
                time.sleep(1.5)
            return []
        with Fence((0, 1), dist.get_rank()).operation("save") as operation:
            stop = time.monotonic() + 2.5
            operation.wait(lambda: time.monotonic() > stop)
            return operation.agree(str(dist.get_rank()))

    assert run_ranks(on_rank, 3) == [["0", "1"], ["0", "1"], []]


def stop_outside_of_the_store(pid: int) -> None:
    """Stop a process while it does not have the file of the store locked, which would stop the others, too."""
    log = log_of(default_store())
    assert log is not None
    with log._path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(pid, signal.SIGSTOP)
        tasks = [Path(task, "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
        while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks):
            time.sleep(0.001)


def test_a_rank_that_was_only_stuck_raises_the_same() -> None:
    def on_rank() -> str:
        pids: list[Any] = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 2:
            time.sleep(0.5)
            stop_outside_of_the_store(pids[1])
            time.sleep(2)
            os.kill(pids[1], signal.SIGCONT)
            return ""
        return str(told(Fence((0, 1), dist.get_rank()), wait_until_told))

    text = f"rank 1 ({HOST}): {SILENT}"
    assert run_ranks(on_rank, 3, store="file") == [text, text, ""]


def test_a_program_that_ends_within_an_operation_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The program beats once a second.
    monkeypatch.setattr(heartbeat, "SILENT_BEATS", 200)
    script = textwrap.dedent(
        """
        import sys
        import torch.distributed as dist
        from fsdp_export.fence import Fence

        def tensors():
            with fence.operation("save") as operation:
                while True:
                    yield operation.agree()

        fence = Fence((0, 1), 1, store=dist.FileStore(sys.argv[1], 2))
        pieces = tensors()
        print(next(pieces))
        """
    )
    store = str(tmp_path / "store")
    program = subprocess.Popen(
        [sys.executable, "-c", script, store], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    def body(operation: Operation) -> None:
        operation.agree()
        wait_until_told(operation)

    error = told(Fence((0, 1), 0, store=dist.FileStore(store, 2)), body)
    output, errors = program.communicate(timeout=30)
    assert (program.returncode, output, errors) == (0, b"['', '']\n", b"")
    assert str(error) == f"rank 1 ({HOST}): the program ended within the export"


def test_no_thread_stays_behind() -> None:
    def on_rank() -> list[str]:
        fence = fence_of_all()
        names = []
        for fails in (False, True):
            with pytest.raises(RankError) if fails else contextlib.nullcontext(), fence.operation("save"):
                names += [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name]
                if fails and dist.get_rank() == 1:
                    raise RankError("no")
            assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]
        return names

    assert run_ranks(on_rank, 2) == [["fsdp-export-heartbeat-1", "fsdp-export-heartbeat-2"]] * 2


def test_interrupts_at_any_moment_never_bring_ranks_out_of_step() -> None:
    is_armed = False

    def interrupt(*_: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def try_once(fence: Fence, delay: float, word: str) -> str:
        """Return rank 0's word if this rank got through."""
        nonlocal is_armed
        try:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            with fence.operation("save") as operation:
                words = operation.agree(word)
                for number in range(3):
                    values = operation.agree(f"{number} of {dist.get_rank()}")
                    assert values == [f"{number} of {rank}" for rank in range(3)]
            is_armed = False
        except (KeyboardInterrupt, RankError):
            is_armed = False
            return ""
        return words[0]

    def on_rank() -> int:
        signal.signal(signal.SIGALRM, interrupt)
        fence = fence_of_all()
        chance = random.Random(dist.get_rank())
        end = time.monotonic() + 2
        for number in itertools.count(1):
            delay = chance.expovariate(100) if time.monotonic() < end else 0.0
            word = "stop" if number > 10 and time.monotonic() > end + 1 else "go on"
            if try_once(fence, delay, word) == "stop":
                return number
        raise AssertionError

    assert min(run_ranks(on_rank, 3)) > 3
