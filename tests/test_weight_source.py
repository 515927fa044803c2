"""What vLLM's trainer engines are given: the same on all ranks, in the order that was told, values of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from hub_models import hub_model
from models import shard, tiny
from ranks import run_ranks
from streams import DeviceModule, Stream

from fsdp_export import Exporter, weight_source
from fsdp_export.errors import RankError
from fsdp_export.weight_source import WeightSource


def test_what_comes_is_what_was_told_and_has_buffers_and_values_of_the_time():
    def check() -> None:
        model: Any = shard(tiny(), "1d", 3)
        source, expected = WeightSource(Exporter(model, bucket_bytes=100)), expected_export(tiny())
        for read in (source.iter_full, source.__iter__, lambda: iter(source)):
            told = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata]
            came = dict(read())
            assert told == [(name, value.dtype, tuple(value.shape)) for name, value in came.items()]
            assert_same({name: came[name] for name in expected}, expected)
            with torch.no_grad():
                model.two_rows.add_(1)
            expected["two_rows"] += 1
        assert "count" in came

    run_ranks(check, 3)


def test_experts_come_in_the_order_that_was_told():
    def check() -> list[str]:
        model = shard(hub_model("qwen3-moe"), "1d", 2)
        source = WeightSource(Exporter(model, bucket_bytes=600, dtype=torch.bfloat16))
        names = [name for name, _ in source]
        assert names == [meta.name for meta in source.metadata] == source.owned_names(1)
        assert {meta.dtype for meta in source.metadata} == {torch.bfloat16}
        return names

    hub_model("qwen3-moe")
    first, second = run_ranks(check, 2)
    assert first == second
    assert any("experts.3" in name for name in first)


def test_it_has_the_shape_that_vllm_asks_for():
    source: Any = WeightSource(Exporter(tiny()))
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    assert source.metadata() is source.metadata  # a method until vLLM 0.31
    assert source.metadata == WeightSource(Exporter(tiny())).metadata
    assert all((meta.owners, meta.mesh_shape, meta.placements) == (None, None, None) for meta in source.metadata)


def test_every_update_is_on_the_same_stream_which_waits_for_training_anew(monkeypatch):
    """What an allocator keeps for one stream serves no other one."""
    module, device = DeviceModule(monkeypatch), torch.device("cuda", 77)  # of no test that follows
    first, second = (weight_source._own_stream(device) for _ in range(2))
    assert first is second
    assert first.device == device
    assert first.waits_for == [module.default, module.current[0]] * 2


def test_tensors_are_gathered_on_that_stream_and_handed_over_on_the_consumers(monkeypatch):
    """The stream, which all updates share, is entered by a context that is new each time: one of two threads failed."""
    module, device = DeviceModule(monkeypatch), torch.device("cuda", 78)  # of no test that follows
    consumer, ties = module.current[0], list[tuple[str, Stream]]()

    def gathered() -> Iterator[tuple[str, Any]]:
        for name in ("a", "b"):
            assert module.current[-1] is ours
            yield name, SimpleNamespace(record_stream=lambda stream, name=name: ties.append((name, stream)))

    ours = weight_source._stream(device)
    exporter: Any = SimpleNamespace(source=SimpleNamespace(device=device), tensors=gathered)
    for number, (_, _) in enumerate(WeightSource(exporter).iter_full()):
        assert module.current == [consumer]
        assert consumer.waits_for == [ours] * (number + 1)
    assert ties == [("a", consumer), ("b", consumer)]
    assert module.entered == [ours] * 3
    assert ours.waits_for == [module.default, consumer]


def test_a_sender_that_is_slow_is_waited_for_and_one_that_leaves_ends_it_for_all():
    """trl#7103: the other two drain at once, and must not gather ahead of what the first one takes."""

    def check() -> None:
        source = WeightSource(Exporter(shard(tiny(), "1d", 3), bucket_bytes=1))
        for _ in source.iter_full():
            time.sleep(0.02 if dist.get_rank() == 0 else 0)

        def leave_early() -> None:
            with closing(source.iter_full()) as tensors:  # type: ignore[type-var]
                for number, _ in enumerate(tensors):
                    if dist.get_rank() == 0 and number == 3:
                        raise RuntimeError("vLLM is gone")

        with pytest.raises(RuntimeError if dist.get_rank() == 0 else RankError):
            leave_early()

    run_ranks(check, 3)
