"""Staging: pieces in memory of this rank, whatever the slabs are, and the same pieces out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from fsdp_export.errors import UsageError
from fsdp_export.fence import Operation
from fsdp_export.plan import Plan
from fsdp_export.sinks import host_memory as memory_module
from fsdp_export.sinks import staged as staged_module
from fsdp_export.sinks.base import Delivery, Sink
from fsdp_export.sinks.host_memory import HostMemory, host_memory
from fsdp_export.sinks.staged import StagedSink, check_staging, prepare
from fsdp_export.spec import Sharding, TensorSpec
from fsdp_export.steps import Piece, copy_step

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (37, 5),
    "vector": (101,),
    "scalar": (),
    "wide": (3, 300),
    "empty": (0, 4),
    "hollow": (4, 0),
}


class Collected(Sink):
    """Puts the rows it gets into whole tensors, and remembers what was called."""

    delivery: Delivery = "once"

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        self.calls.append("begin")
        self.tensors = {info.name: torch.full(info.shape, -1.0).to(info.dtype) for info in plan.outputs}
        return "ticket"

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        self.calls.append(f"open {ticket}")

    def write(self, piece: Piece) -> None:
        target = self.tensors[piece.info.name]
        assert piece.tensor.dtype == piece.info.dtype
        if target.dim():
            target[piece.first_row : piece.first_row + len(piece.tensor)] = piece.tensor
        else:
            target.copy_(piece.tensor)

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMemory]:
    """Memory that only this test uses."""
    monkeypatch.setattr(memory_module, "_memory", HostMemory())
    yield host_memory()
    host_memory().end()
    host_memory().release()


def plan_of(dtype: torch.dtype) -> Plan:
    replicated = Sharding.replicated((0,))
    return Plan(tuple(copy_step(TensorSpec(name, shape, dtype, replicated)) for name, shape in SHAPES.items()))


def staged(sink: Sink, plan: Plan, tensors: dict[str, torch.Tensor], staging: Any = "auto") -> StagedSink:
    """Stage all rows, seven at a time, and spoil the tensors after that."""
    sink = StagedSink(sink, staging)
    sink.open(plan, 0, sink.begin(plan, []))
    for info in plan.outputs:
        tensor = tensors[info.name]
        for first in range(0, max(info.num_rows, 1), 7):
            sink.write(Piece(info, first, tensor[first : first + 7] if tensor.dim() else tensor))
    sink.close()
    sink.commit()
    for tensor in tensors.values():
        tensor.zero_()
    return sink


@pytest.mark.parametrize("slab_bytes", [64, 100, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_pieces_come_out_as_they_were_whatever_the_slabs(dtype, slab_bytes, monkeypatch):
    monkeypatch.setattr(memory_module, "_SLAB_BYTES", slab_bytes)
    plan, sizes = plan_of(dtype), []
    for seed in range(3):
        torch.manual_seed(seed)
        tensors = {info.name: torch.randint(1, 100, info.shape).to(dtype) for info in plan.outputs}
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        target, delivered = Collected(), list[int]()
        sink = staged(target, plan, tensors)
        assert target.calls == ["begin", "open ticket"]
        sink.deliver(Operation(), delivered.append)
        assert all(torch.equal(target.tensors[name], expected[name]) for name in expected)
        assert sum(delivered) == plan.num_bytes
        sink.release()
        sizes.append(host_memory().num_bytes)
    # Memory is kept, and is enough.
    assert sizes == [sizes[0]] * 3
    host_memory().release()
    assert host_memory().num_bytes == 0


def test_large_pieces_on_a_device_waste_no_slab():
    sink = StagedSink(Collected(), "device")
    sizes = [300 << 20, 1000, 260 << 20, 40 << 20, 40 << 20, 3, 70 << 20, 64 << 20] * 3
    sink._num_bytes = sum(sizes)
    rooms = [sink._take(size, torch.device("cpu")) for size in sizes]
    assert [room.numel() for room in rooms] == sizes
    assert sink._device_bytes <= 1.125 * sum(sizes) + staged_module._SLAB_BYTES
    starts = sorted((room.data_ptr(), room.data_ptr() + room.numel()) for room in rooms)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(starts))


def test_memory_that_was_prepared_is_used(monkeypatch):
    monkeypatch.setattr(memory_module, "_SLAB_BYTES", 4096)
    plan = plan_of(torch.float32)
    prepare(plan, CPU, "auto", are_offloaded=True)
    host_memory().wait()
    assert host_memory().num_bytes == plan.num_bytes
    slabs = list(host_memory()._slabs)
    tensors = {info.name: torch.ones(info.shape) for info in plan.outputs}
    target = Collected()
    sink = staged(target, plan, tensors)
    assert host_memory()._slabs[: len(slabs)] == slabs
    sink.deliver(Operation(), lambda _: None)
    assert all((tensor == 1).all() for tensor in target.tensors.values())
    sink.release()


def test_memory_in_use_is_not_given_back():
    plan = plan_of(torch.float32)
    sink = staged(Collected(), plan, {info.name: torch.ones(info.shape) for info in plan.outputs})
    num_bytes = host_memory().num_bytes
    host_memory().release()
    assert host_memory().num_bytes == num_bytes > 0
    sink.abort()
    host_memory().release()
    assert host_memory().num_bytes == 0


def test_an_abort_before_anything_was_staged_takes_nothing_from_another_save():
    plan = plan_of(torch.float32)
    staged(Collected(), plan, {info.name: torch.ones(info.shape) for info in plan.outputs})
    target = Collected()
    StagedSink(target, "auto").abort()
    assert target.calls == ["abort"]
    host_memory().release()
    assert host_memory().num_bytes > 0


def test_threads_for_copies_are_those_of_before_afterwards(monkeypatch):
    monkeypatch.setattr(staged_module.os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before, plan = torch.get_num_threads(), plan_of(torch.float32)
    torch.set_num_threads(1)
    try:
        for end in ("close", "abort"):
            sink = StagedSink(Collected(), "auto")
            sink.open(plan, 0, sink.begin(plan, []))
            assert torch.get_num_threads() == 3
            getattr(sink, end)()
            assert torch.get_num_threads() == 1
            sink.release()
    finally:
        torch.set_num_threads(before)


class Pretended:
    """What torch knows of a device, of which 10 bytes are free and 30 in its cache."""

    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("num_bytes", "staged_before", "cached", "expected"),
    [(5, 0, 30, True), (6, 0, 30, False), (11, 6, 30, True), (12, 6, 30, False), (11, 6, 2, False)],
    ids=["fits", "needs-the-spare", "is-that-of-the-last-save", "needs-more", "was-given-back"],
)
def test_a_device_has_room_that_training_never_used(num_bytes, staged_before, cached, expected, monkeypatch):
    device = torch.device("cuda", 1)
    module = Pretended(
        mem_get_info=lambda _: (10, 100), memory_reserved=lambda _: 40 + cached, memory_allocated=lambda _: 40
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setitem(staged_module._staged_before, device, staged_before)
    assert staged_module._has_room(device, num_bytes) == expected


def test_a_device_that_does_not_tell_has_no_room(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: Pretended())
    assert not staged_module._has_room(torch.device("cuda"), 0)


def test_memory_is_pinned_once_it_is_free_and_a_refusal_is_not_asked_for_again(monkeypatch):
    answers, asked = [True, False], list[int]()

    def pin(memory: torch.Tensor, device: torch.device) -> bool:
        asked.append(memory.data_ptr())
        return answers.pop(0)

    unpinned: list[int] = []
    monkeypatch.setattr(memory_module, "pin", pin)
    monkeypatch.setattr(memory_module, "unpin", lambda memory: unpinned.append(memory.data_ptr()))
    monkeypatch.setattr(memory_module, "_SLAB_BYTES", 4096)
    memory, device = host_memory(), torch.device("cuda", 0)
    memory.begin()
    for _ in range(3):
        assert len(memory.take(4096, 4096)) == 4096
    memory.prepare(0, device)
    memory.wait()
    assert asked == []
    memory.end()
    memory.prepare(0, device)
    memory.wait()
    assert [slab.is_pinned for slab in memory._slabs] == [True, False, False]
    assert len(asked) == 2
    memory.prepare(0, device)
    memory.wait()
    assert len(asked) == 2
    memory.release()
    assert unpinned == asked[:1]


@pytest.mark.parametrize("staging", ["", "cpu", "gpu", None])
def test_no_such_staging(staging):
    with pytest.raises(UsageError, match=f"no such staging: expected auto, device or host, found {staging!r}"):
        check_staging(staging)
