"""Which tensors share a bucket, where they lie in it, and that they come out as they went in."""

from __future__ import annotations

import pytest
import torch
from exports import assert_same, expected_export
from hub_models import hub_model
from models import shard, tiny
from ranks import run_ranks

from fsdp_export import Exporter
from fsdp_export.errors import UsageError
from fsdp_export.spec import TensorInfo
from fsdp_export.transfer.buckets import Packer, lay_out


def infos(*names: str, shape: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float32) -> list[TensorInfo]:
    return [TensorInfo(name, shape, dtype) for name in names]


@pytest.mark.parametrize("max_bytes", [1, 40, 64, 100, 1000])
def test_what_an_engine_joins_is_never_split(max_bytes):
    layers = ("self_attn.q_a_proj", "self_attn.kv_a_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.gate_proj_scale")
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(3) for part in layers]
    buckets = lay_out(infos(*names), max_bytes)
    where = {entry.info.name: index for index, bucket in enumerate(buckets) for entry in bucket.entries}
    assert list(where) == names
    for name in names:
        assert where[name] == where[names[names.index(name) // 5 * 5 + (0 if "attn" in name else 2)]]
    largest_module = 3 * 32
    assert max(bucket.num_bytes for bucket in buckets) <= max(max_bytes, largest_module)


@pytest.mark.parametrize("align", [1, 256])
def test_every_tensor_begins_at_a_multiple_of_its_element_size(align):
    dtypes = (torch.bool, torch.bfloat16, torch.float64, torch.uint8, torch.float32)
    given = [TensorInfo(f"m.{index}.{dtype}", (3,), dtype) for index in range(3) for dtype in dtypes]
    given += [TensorInfo("m.none", (0, 5), torch.int64), TensorInfo("m.one", (), torch.int64)]
    (bucket,) = lay_out(given, 1 << 20, align=align)
    end = 0
    for entry in bucket.entries:
        assert entry.offset % max(entry.info.dtype.itemsize, align) == 0
        assert entry.offset == -(-end // align) * align
        end = entry.offset + entry.info.num_bytes
    assert end == bucket.num_bytes
    assert sorted(entry.info.name for entry in bucket.entries) == sorted(info.name for info in given)


def test_tensors_come_out_as_they_went_in():
    given = {
        "a.wide": torch.randn(3, 5, dtype=torch.float64),
        "a.turned": torch.randn(4, 6).t(),
        "a.half": torch.randn(7).bfloat16(),
        "a.nothing": torch.empty(0, 3),
        "b.one": torch.tensor(2**40 + 1),
        "b.is": torch.tensor([True, False]),
    }
    planned = [TensorInfo(name, tuple(value.shape), value.dtype) for name, value in given.items()]
    for max_bytes in (1, 100, 1000):
        packer = Packer(
            lay_out(planned, max_bytes), lambda size, device: torch.empty(size, dtype=torch.uint8, device=device)
        )
        buckets = [packer.add(info, value) for info, value in zip(planned, given.values(), strict=True)]
        came = {name: value for bucket in buckets if bucket is not None for name, value in bucket.tensors()}
        assert_same({name: came[name] for name in given}, given)


@pytest.mark.parametrize(("max_bytes", "align"), [(1, 1), (300, 256), (1 << 20, 8)])
@pytest.mark.parametrize("bucket_bytes", [1, 200, None])
def test_buckets_of_a_sharded_module_hold_what_it_has(bucket_bytes, max_bytes, align):
    def check() -> None:
        expected = expected_export(tiny())
        exporter = Exporter(shard(tiny(), "hsdp", 4), bucket_bytes=bucket_bytes)
        came = {
            name: value.clone()
            for bucket in exporter.buckets(max_bytes, align=align)
            for name, value in bucket.tensors()
        }
        assert_same({name: came[name] for name in expected}, expected)
        assert len(came) == len(expected)

    run_ranks(check, 4)


def test_experts_come_in_the_order_that_is_told_before():
    def check() -> None:
        exporter = Exporter(shard(hub_model("qwen3-moe"), "1d", 2), bucket_bytes=20_000)
        told = [info.name for info in exporter.plan.in_order_of_delivery(20_000).outputs]
        assert told == [name for name, _ in exporter.tensors()]
        assert told != [info.name for info in exporter.plan.outputs]
        assert sorted(told) == sorted(info.name for info in exporter.plan.outputs)

    run_ranks(check, 2)


def test_tied_tensors_come_under_all_their_names_if_one_asks_for_it():
    def check() -> None:
        came = dict(Exporter(shard(tiny(), "1d", 2)).tensors(aliases=True))
        assert torch.equal(came["head.weight"], came["embed.weight"])
        names = [name for name in tiny().state_dict() if name != "head.weight"]
        names.insert(names.index("embed.weight") + 1, "head.weight")
        assert list(came) == names

    run_ranks(check, 2)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": 10, "align": 0}])
def test_buckets_of_no_size_are_refused(options):
    with pytest.raises(UsageError, match="no size"):
        next(Exporter(tiny()).buckets(**options))
