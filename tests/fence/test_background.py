"""Operations in the background: beside those of the loop, and after the process group."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch.distributed as dist
from ranks import StoreKind, run_ranks

from fsdp_export.compat import default_store
from fsdp_export.errors import RankError
from fsdp_export.fence import Fence


def fence_of_all(*, is_background: bool) -> Fence:
    return Fence(range(dist.get_world_size()), dist.get_rank(), is_background=is_background)


def meet(fence: Fence, what: str, times: int) -> list[list[str]]:
    with fence.operation(what) as operation:
        return [operation.agree(f"{what} {number} {dist.get_rank()}") for number in range(times)]


def expected(what: str, times: int) -> list[list[str]]:
    return [[f"{what} {number} {rank}" for rank in range(3)] for number in range(times)]


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_operations_of_a_thread_and_of_the_loop_do_not_meet(store: StoreKind) -> None:
    """One rank begins with that of the thread, the others with that of the loop."""

    def on_rank() -> bool:
        loop, behind = fence_of_all(is_background=False), fence_of_all(is_background=True)
        found: list[list[list[str]]] = []
        thread = threading.Thread(target=lambda: found.append(meet(behind, "save", 20)))
        if dist.get_rank() == 1:
            thread.start()
            time.sleep(0.2)
        with loop.operation("loop") as operation:
            if dist.get_rank() != 1:
                thread.start()
            rounds = [operation.agree(f"loop {number} {dist.get_rank()}") for number in range(20)]
            if dist.get_rank() == 2:
                thread.join()
        rounds += meet(loop, "loop", 2)
        thread.join()
        return rounds == expected("loop", 20) + expected("loop", 2) and found == [expected("save", 20)]

    assert run_ranks(on_rank, 3, store=store) == [True] * 3


def test_an_error_behind_the_loop_is_none_of_the_loop() -> None:
    def on_rank() -> list[str]:
        loop, behind = fence_of_all(is_background=False), fence_of_all(is_background=True)
        with loop.operation("loop") as operation:
            with pytest.raises(RankError) as caught, behind.operation("save"):
                assert dist.get_rank() != 1, "no"
            operation.check()
            operation.agree()
        meet(behind, "save", 1)
        return [str(caught.value)[:8]]

    assert run_ranks(on_rank, 3) == [["rank 1 ("]] * 3


def test_keys_of_the_background_do_not_pile_up() -> None:
    def on_rank() -> int:
        behind = fence_of_all(is_background=True)
        counts = []
        for _ in range(3):
            meet(behind, "save", 3)
            dist.barrier()
            counts.append(default_store().num_keys())
            dist.barrier()
        return len(set(counts))

    assert run_ranks(on_rank, 3, store="tcp")[0] == 1


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_the_store_lives_as_long_as_the_fence(store: StoreKind) -> None:
    def on_rank() -> bool:
        behind, rank = fence_of_all(is_background=True), dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        with behind.operation("save") as operation:
            return operation.agree(str(rank)) == ["0", "1", "2"]

    assert run_ranks(on_rank, 3, store=store) == [True] * 3
