from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailedError, StoreKind, run_ranks


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("store", ["tcp", "file"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_order_of_ranks(world_size: int, store: StoreKind) -> None:
    def on_rank(offset: int) -> tuple[int, int]:
        total = torch.tensor(dist.get_rank() + offset)
        dist.all_reduce(total)
        return dist.get_rank(), int(total)

    total = sum(range(10, 10 + world_size))
    assert run_ranks(on_rank, world_size, 10, store=store) == [(rank, total) for rank in range(world_size)]


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    def on_rank() -> None:
        if dist.get_rank() == 1:
            raise LookupError("nowhere")
        dist.barrier()

    with pytest.raises(RankFailedError, match=r"(?s)rank 1 raised.*in on_rank.*LookupError: nowhere"):
        run_ranks(on_rank, 3)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match="pickle"):
        run_ranks(lambda: lambda: None, 1)


def test_ranks_that_hang_are_killed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[1, 2\] did not finish within 8 s"):
        run_ranks(lambda: time.sleep(60 * dist.get_rank()), 3, timeout=8)
    assert "test_ranks.py" in capfd.readouterr().err


def test_a_death_that_nobody_expects_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match="rank 0 died with exit code -9"):
        run_ranks(kill_myself, 1)


def test_a_rank_that_may_die_has_no_result() -> None:
    assert run_ranks(lambda: kill_myself() if dist.get_rank() else "lives", 2, expect_death={1}) == ["lives", None]
