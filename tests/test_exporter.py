"""What an Exporter delivers, and what it says when it cannot."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from exports import assert_exports, assert_same, expected_export
from models import hf_model, shard, tiny
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from fsdp_export import Exporter, export_checkpoint, load_checkpoint
from fsdp_export.errors import NotFoundError, PlanError, RankError, SinkError, UsageError
from fsdp_export.sinks.base import MemorySink, Sink
from fsdp_export.steps import Piece


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000, None])
def test_no_bucket_changes_what_a_loop_or_a_sink_gets(bucket_bytes):
    def check() -> None:
        for layout in ("1d", "dim1", "hsdp", "tp"):
            exporter = Exporter(shard(tiny(), layout, 4), bucket_bytes=bucket_bytes)
            assert_same(dict(exporter.tensors()), expected_export(tiny()))
            sink = MemorySink()
            exporter.send(sink)
            assert_same({name: torch.as_tensor(value) for name, value in sink.tensors.items()}, expected_export(tiny()))

    run_ranks(check, 4)


def _placed(dim: int, _: nn.Parameter) -> Shard:
    return Shard(dim)


class Mixed(nn.Module):
    """One tensor of every kind of dtype."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            values = torch.linspace(-3, 70_000, 5 * 6, dtype=torch.float64).reshape(5, 6)
            self.register_parameter(f"in_{str(dtype)[6:]}", nn.Parameter(values.to(dtype)))
        self.register_buffer("count", torch.tensor([2**40 + 1, -1]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("packed", torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("statistics", torch.tensor(1 / 3))


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        ("keep", None),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("torch.float32", torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_floating_tensors_are_cast_and_nothing_else(dtype, target, tmp_path):
    cast = {"in_float32", "in_bfloat16", "in_float16", "in_float64", "statistics"}
    expected = {
        name: value.to(target) if name in cast and target is not None else value
        for name, value in expected_export(Mixed()).items()
    }

    def check() -> None:
        for dim in (0, 1):
            model = Mixed()
            place = partial(_placed, dim)
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=place)
            assert_exports(model, expected, tmp_path, dtype=dtype)

    assert_exports(Mixed(), expected, tmp_path, dtype=dtype)
    run_ranks(check, 2)


@pytest.mark.parametrize("dtype", ["int8", "auto", "", torch.int32, torch.float64, torch.float8_e4m3fn])
def test_a_dtype_to_which_nothing_is_cast(dtype):
    with pytest.raises(UsageError) as caught:
        Exporter(tiny(), dtype=dtype)
    assert str(caught.value) == (
        f"a dtype to which nothing is cast: expected keep, bf16, bfloat16, fp16, float16, fp32, float32, found {dtype}"
    )


def test_patterns_choose_names_and_count_hits(tmp_path):
    names = {"blocks.0.up.weight", "blocks.0.up.bias", "blocks.1.up.weight"}

    def check() -> None:
        exporter = Exporter(shard(tiny(), "1d", 2), include=["*.up.*"], exclude=["blocks.1.up.bias"])
        expected = {name: value for name, value in expected_export(tiny()).items() if name in names}
        assert_same(dict(exporter.tensors()), expected)
        assert exporter.pattern_hits == {"*.up.*": 4, "blocks.1.up.bias": 1}
        exporter.save(tmp_path / "out", fsync=False)
        with pytest.raises(UsageError, match=r"the pattern 'upp' matches none of 14 tensors\. Give whole segments"):
            Exporter(shard(tiny(), "1d", 2), include=["upp"]).save(tmp_path / "none")
        with pytest.raises(NotFoundError, match=r"no tensor is left of 14\. Give patterns"):
            Exporter(shard(tiny(), "1d", 2), exclude=["*"]).save(tmp_path / "none")

    run_ranks(check, 2)
    assert not (tmp_path / "none").exists()


def test_a_second_walk_reads_new_values_and_plans_no_more():
    def check() -> None:
        model = shard(tiny(), "1d", 2)
        exporter = Exporter(model)
        assert_same(dict(exporter.tensors()), expected_export(tiny()))
        plan = exporter.plan
        other = tiny()
        with torch.no_grad():
            for twin in (model, other):
                for parameter in twin.parameters():
                    parameter.mul_(3)
        assert_same(dict(exporter.tensors()), expected_export(other))
        assert exporter.plan is plan

    run_ranks(check, 2)


@pytest.mark.parametrize("stopping", [0, 1])
def test_a_loop_that_stops_early_on_one_rank_is_an_error_on_the_others(stopping):
    def check() -> str | None:
        exporter = Exporter(shard(tiny(), "1d", 3), bucket_bytes=1)
        message = None
        try:
            for position, _ in enumerate(exporter.tensors()):
                if dist.get_rank() == stopping and position == 2:
                    break
        except RankError as error:
            message = str(error)
        dist.all_reduce(torch.ones(1))
        assert_same(dict(exporter.tensors()), expected_export(tiny()))
        return message

    messages = run_ranks(check, 3)
    assert messages.pop(stopping) is None
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"rank {stopping} (")
    assert messages[0].endswith("): stopped early")


def test_a_loop_that_raises_on_one_rank():
    def check() -> None:
        exporter = Exporter(shard(tiny(), "1d", 2), bucket_bytes=1)
        error, message = (KeyError, "mine") if dist.get_rank() else (RankError, "rank 1 .*: stopped early")
        with pytest.raises(error, match=message):  # noqa: PT012  a loop is what is tested
            for name, _ in exporter.tensors():
                if dist.get_rank() and name == "two_rows":
                    raise KeyError("mine")
        assert_same(dict(exporter.tensors()), expected_export(tiny()))

    run_ranks(check, 2)


@pytest.mark.parametrize("calling", [0, 1])
def test_a_rank_that_calls_alone_is_told_so(calling, tmp_path):
    def check() -> str | None:
        exporter = Exporter(shard(tiny(), "1d", 2), timeout=0.5)
        message = None
        if dist.get_rank() == calling:
            with pytest.raises(RankError) as caught:
                exporter.save(tmp_path / "out")
            message = str(caught.value)
        dist.barrier()
        return message

    message = run_ranks(check, 2)[calling]
    other = f"rank {1 - calling}"
    assert message == f"Exporter.send must be called on every rank, but {other} did not call it within 0.5 s"
    assert not (tmp_path / "out").exists()


class FailingSink(Sink):
    """Fails on one rank at a piece."""

    def __init__(self, rank: int, position: int) -> None:
        self.rank, self.position = rank, position
        self.aborted = 0

    def write(self, piece: Piece) -> None:
        self.position -= 1
        if self.position < 0 and dist.get_rank() == self.rank:
            raise SinkError("the engine is gone", name=piece.info.name)

    def abort(self) -> None:
        self.aborted += 1


@pytest.mark.parametrize("delivery", ["everyone", "once"])
def test_a_sink_that_fails_at_any_piece_on_any_rank_fails_on_all(delivery):
    def check() -> None:
        exporter = Exporter(shard(tiny(), "1d", 2), bucket_bytes=100)
        for rank, position in itertools.product((0, 1), (0, 3, 6)):
            sink = FailingSink(rank, position)
            sink.delivery = delivery
            with pytest.raises(SinkError, match=f"rank {rank} .*: the engine is gone for "):
                exporter.send(sink)
            assert sink.aborted == 1
        assert_same(dict(exporter.tensors()), expected_export(tiny()))

    run_ranks(check, 2)


def test_what_safetensors_cannot_store_fails_before_a_byte_is_written(tmp_path):
    def check() -> None:
        model = shard(tiny(), "1d", 2)
        model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
        assert dict(Exporter(model).tensors())["phase"].dtype == torch.complex128
        with pytest.raises(
            PlanError, match=r"a dtype that safetensors cannot store for 'phase': found torch\.complex128"
        ):
            Exporter(model).save(tmp_path / "out")
        Exporter(model, exclude=["phase"]).save(tmp_path / "some", fsync=False)

    run_ranks(check, 2)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "some" / "model.safetensors").is_file()


def test_ranks_that_would_lay_out_files_differently(tmp_path):
    def check() -> None:
        exporter = Exporter(shard(hf_model("llama"), "1d", 2))
        for sizes in ((2000, 2500), (3000, 3300), ("5GB", "2KB")):
            with pytest.raises(SinkError, match="the ranks lay out the files differently in "):
                exporter.save(tmp_path / "out", max_shard_size=sizes[dist.get_rank()])
        assert_same(dict(exporter.tensors()), expected_export(hf_model("llama")))

    run_ranks(check, 2)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "another"])
def test_an_export_within_an_export_is_refused(tmp_path, is_same):
    def check() -> None:
        exporter = Exporter(shard(tiny(), "1d", 2))
        inner = exporter if is_same else Exporter(shard(tiny(), "1d", 2))
        with pytest.raises(UsageError, match="was called within another export"):  # noqa: PT012  as above
            for _ in exporter.tensors():
                inner.save(tmp_path / "out")
        assert_same(dict(exporter.tensors()), expected_export(tiny()))

    run_ranks(check, 2)


def test_no_default_device_decides_where_memory_of_ours_is(tmp_path):
    """A script that makes its model on a device often has that as the default; on meta nothing could be read."""

    def check() -> None:
        model, other = shard(tiny(tied=False), "1d", 2), shard(tiny(tied=False), "1d", 2)
        torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        with torch.device("meta"):
            delivered = dict(Exporter(model).tensors())
            Exporter(model).save(tmp_path / "now", format="safetensors", fsync=False)
            Exporter(model).save(tmp_path / "later", format="safetensors", fsync=False, blocking=False).wait()
            load_checkpoint(other, tmp_path / "now")
        assert_same(delivered, expected)
        assert_same(dict(Exporter(other).tensors()), expected)

    expected = expected_export(tiny(tied=False))
    run_ranks(check, 2)
    with torch.device("meta"):
        export_checkpoint(tmp_path / "dcp", tmp_path / "from-dcp", format="safetensors", fsync=False)
    for folder in ("now", "later", "from-dcp"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert_same({name: saved[name] for name in expected}, expected)


def test_save_needs_a_module(tmp_path):
    exporter = Exporter(Exporter(tiny()).source)
    assert_same(dict(exporter.tensors()), expected_export(tiny()))
    with pytest.raises(UsageError, match=r"save\(\) needs a module. Use send\(\) with a sink"):
        exporter.save(tmp_path / "out")


def test_the_report_tells_what_was_written(tmp_path):
    exporter = Exporter(tiny())
    delivered = [0]
    report = exporter.save(tmp_path / "out", delivered=delivered.append)
    assert report.num_bytes == sum(delivered) == exporter.plan.num_bytes
    assert report.num_tensors == len(expected_export(tiny()))
    assert report.files == {"model.safetensors": (tmp_path / "out" / "model.safetensors").stat().st_size}
    assert "embed.weight" in str(exporter.plan)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"align": 0}, {"align": -8}, {"align": 3}, {"align": 24}])
def test_buckets_in_which_no_tensor_could_be_seen_are_refused(options):
    with pytest.raises(UsageError, match=r"buckets of no size|places where no tensor can begin"):
        next(Exporter(tiny()).buckets(**options))
