from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import StoreKind, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_export.compat import all_gather_into, connect, default_store, has_multi_get, local_of, pin


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_shards_are_gathered_in_order_of_ranks_without_a_warning(async_op: bool) -> None:
    def on_rank() -> list[int]:
        output = torch.zeros(6, dtype=torch.uint8)
        shard = torch.tensor([1, 2], dtype=torch.uint8) + 10 * dist.get_rank()
        work = all_gather_into(output, shard, async_op=async_op)
        if work is not None:
            work.wait()
        assert (work is not None) == async_op
        return output.tolist()

    # Warnings are errors in the tests, and the ranks inherit that.
    assert run_ranks(on_rank, 3) == [[1, 2, 11, 12, 21, 22]] * 3


def test_a_group_other_than_the_default_one() -> None:
    def on_rank() -> list[int]:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        output = torch.zeros(2 if dist.get_rank() != 1 else 1)
        all_gather_into(output, torch.full((1,), float(dist.get_rank())), groups[dist.get_rank() % 2])
        return output.tolist()

    assert run_ranks(on_rank, 3) == [[0, 2], [1], [0, 2]]


@pytest.mark.parametrize(("kind", "reads_many"), [("tcp", True), ("file", False)])
def test_the_default_store_is_shared_and_a_connection_keeps_to_its_prefix(kind: StoreKind, reads_many: bool) -> None:
    def on_rank() -> tuple[bytes, bool, bool]:
        store = connect(default_store(), "ours")
        if dist.get_rank() == 0:
            store.set("key", "value")
        dist.barrier()
        return store.get("key"), default_store().check(["key"]), has_multi_get(store)

    assert run_ranks(on_rank, 2, store=kind) == [(b"value", False, reads_many)] * 2


def test_without_a_group_there_is_no_store() -> None:
    with pytest.raises(ValueError, match="process group"):
        default_store()


def test_what_comes_before_threads_end_still_has_pools_of_threads() -> None:
    code = (
        "import atexit; from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "from fsdp_export.compat import before_threads_end\n"
        "pool = Pool(1)\n"
        "before_threads_end(lambda: print(pool.submit(int, '7').result(), flush=True))\n"
        "atexit.register(print, 'later')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert ended.stdout == "7\nlater\n"


def test_the_block_of_a_parameter_is_the_same_object_in_its_memory() -> None:
    def on_rank() -> None:
        full = torch.arange(12.0).view(6, 2)
        parameter: Any = torch.nn.Parameter(distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)]))
        local = local_of(parameter)
        assert local is local_of(parameter)
        assert torch.equal(local, full.chunk(2)[dist.get_rank()])
        local.detach().fill_(7)
        assert parameter.full_tensor().eq(7).all()

    run_ranks(on_rank, 2)


def test_a_cpu_pins_nothing() -> None:
    assert not pin(torch.zeros(4096, dtype=torch.uint8), torch.device("cpu"))
