"""What the walk hands out, by whom, and how much memory that takes."""

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from live_bytes import LiveBytes
from models import shard, tiny
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from fsdp_export import Exporter, collectives, walk
from fsdp_export.errors import ExportError, SinkError, SourceError
from fsdp_export.plan import Plan
from fsdp_export.sinks.base import Delivery, MemorySink, Sink
from fsdp_export.sources.live import LiveSource
from fsdp_export.spec import TensorSpec
from fsdp_export.steps import Piece

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3


class Recorder(Sink):
    """Remembers which rows came, their values, and in which order the calls did."""

    def __init__(self, delivery: Delivery = "once") -> None:
        self.delivery = delivery
        self.calls: list[str] = []
        self.rows: Counter[tuple[str, int]] = Counter()
        self.num_bytes = 0

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        self.calls.append("begin")
        self.expected = expected_export(tiny())
        return "ticket"

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        self.calls.append(f"open {rank} {ticket}")
        self.expected = expected_export(tiny())

    def write(self, piece: Piece) -> None:
        expected = self.expected[piece.info.name]
        count = len(piece.tensor) if expected.dim() else 1
        rows = expected[piece.first_row : piece.first_row + count] if expected.dim() else expected
        assert_same({piece.info.name: piece.tensor}, {piece.info.name: rows})
        self.rows.update((piece.info.name, piece.first_row + row) for row in range(count))
        self.num_bytes += piece.tensor.nbytes

    def close(self) -> None:
        self.calls.append("close")

    def commit(self) -> None:
        self.calls.append("commit")

    def abort(self) -> None:
        self.calls.append("abort")


def all_rows() -> Counter[tuple[str, int]]:
    tensors = expected_export(tiny()).items()
    return Counter((name, row) for name, value in tensors for row in range(len(value) if value.dim() else 1))


@pytest.mark.parametrize("bucket_bytes", [1, 200, None])
@pytest.mark.parametrize("gather_all", [False, True], ids=["planned", "forced"])
@pytest.mark.parametrize("layout", ["1d", "dim1", "hsdp", "tp"])
def test_every_row_goes_once_to_a_sink_of_files(layout, gather_all, bucket_bytes):
    def check() -> tuple[Counter[tuple[str, int]], int]:
        sink, delivered = Recorder(), [0]
        exporter = Exporter(shard(tiny(), layout, 4), bucket_bytes=bucket_bytes)
        exporter.send(sink, gather_all=gather_all, delivered=delivered.append)
        assert sum(delivered) == sink.num_bytes
        return sink.rows, sink.num_bytes

    rows, sizes = zip(*run_ranks(check, 4), strict=True)
    assert sum(rows, Counter()) == all_rows()
    assert sum(sizes) == Exporter(tiny()).plan.num_bytes


def test_every_row_goes_to_every_rank_of_a_sink_of_engines():
    def check() -> Counter[tuple[str, int]]:
        sink = Recorder("everyone")
        Exporter(shard(tiny(), "tp", 4), bucket_bytes=200).send(sink)
        return sink.rows

    assert run_ranks(check, 4) == [all_rows()] * 4


def test_a_large_tensor_is_read_in_chunks(monkeypatch):
    monkeypatch.setattr(walk, "CHUNK_BYTES", 64)
    sink = Recorder()
    Exporter(tiny()).send(sink)
    assert sink.rows == all_rows()


def test_the_calls_to_a_sink():
    def check() -> list[str]:
        sink = Recorder()
        Exporter(shard(tiny(), "1d", 2)).send(sink)
        return sink.calls

    expected = [["begin", "open 0 ticket", "close", "commit"], ["open 1 ticket", "close"]]
    assert run_ranks(check, 2) == expected


@pytest.mark.parametrize("call", ["begin", "open", "write", "close", "commit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_call_aborts_on_every_rank(call, rank):
    def fail(*_: object) -> None:
        raise SinkError(f"{call} failed")

    def check() -> tuple[str | None, list[str]]:
        sink, message = Recorder(), None
        if dist.get_rank() == rank:
            setattr(sink, call, fail)
        exporter = Exporter(shard(tiny(), "1d", 2))
        try:
            exporter.send(sink)
        except SinkError as error:
            message = str(error)
        assert_same(dict(exporter.tensors()), expected_export(tiny()))
        return message, sink.calls

    (message, calls), (other_message, other_calls) = run_ranks(check, 2)
    assert message == other_message
    if rank == 1 and call in {"begin", "commit"}:
        assert message is None
        assert "abort" not in calls + other_calls
    else:
        assert message is not None
        assert message.startswith(f"rank {rank} (")
        assert message.endswith(f"): {call} failed")
        assert calls[-1] == other_calls[-1] == "abort"


class Flaky(LiveSource):
    """Cannot read the rows of its n-th call on one rank."""

    def __init__(self, model: nn.Module, rank: int, position: int) -> None:
        super().__init__(model)
        self._failing, self._position = rank, position

    def rows(self, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        self._position -= 1
        if self._position < 0 and self.rank == self._failing:
            raise SourceError("a disk that is gone", name=spec.name)
        return super().rows(spec, first, stop)


@pytest.mark.parametrize("delivery", ["everyone", "once"])
def test_a_source_that_fails_at_any_read_on_any_rank_fails_on_all(delivery):
    def check() -> None:
        for layout, rank, position in itertools.product(("1d", "dim1"), (0, 2), (0, 1, 5, 9)):
            model = shard(tiny(tied=False), layout, 3)
            with pytest.raises(SourceError, match=f"rank {rank} .*: a disk that is gone for "):
                Exporter(Flaky(model, rank, position), bucket_bytes=100).send(Dropping(delivery))
            dist.all_reduce(torch.ones(1))
        assert_same(dict(Exporter(model).tensors()), expected_export(tiny(tied=False)))

    run_ranks(check, 3)


class Dropping(Sink):
    """Takes pieces and keeps nothing."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery

    def write(self, piece: Piece) -> None:
        pass


def many_megabytes(num_bytes: int, dim: int = 0) -> nn.Module:
    """Return parameters of 1 MiB each, half of each on either of two ranks."""
    model = nn.ParameterList([torch.full((512, 512), float(index)) for index in range(num_bytes // MIB)])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: Shard(dim))
    return model


@pytest.mark.parametrize("use", ["loop", "everyone", "once"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_at_most_two_buckets_are_alive(dim, use, monkeypatch):
    """Case G3. Beside the buckets: the scratch memory of one collective, which gloo may drop one later."""
    monkeypatch.setattr(collectives, "_SMALL_BYTES_ON_CPU", 2 * MIB)
    monkeypatch.setattr(collectives, "_BATCH_BYTES", 2 * MIB)
    bucket_bytes, scratch_bytes = 10 * MIB, 3 * MIB

    def check() -> tuple[int, int]:
        exporter = Exporter(many_megabytes(50 * MIB, dim), bucket_bytes=bucket_bytes)
        counter, most = LiveBytes(), 0
        yielded: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        with counter:
            if use != "loop":
                exporter.send(Dropping(use), gather_all=True)
                return counter.peak, 1
            for _, tensor in exporter.tensors():
                yielded.add(tensor)
                most = max(most, len(yielded))
                del tensor
        return counter.peak, most

    for peak, most in run_ranks(check, 2):
        assert 2 * bucket_bytes <= peak <= 2 * bucket_bytes + 2 * scratch_bytes
        assert 1 <= most <= 10


def test_a_consumer_that_keeps_everything_gets_tensors_that_stay():
    def check() -> None:
        kept = [tensor for _, tensor in Exporter(many_megabytes(50 * MIB), bucket_bytes=3 * MIB).tensors()]
        assert all(torch.equal(tensor, torch.full((512, 512), float(index))) for index, tensor in enumerate(kept))

    run_ranks(check, 2)


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class Sampler(threading.Thread):
    """Watches the memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = anonymous_bytes()
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def stop(self) -> int:
        self._is_over.set()
        self.join()
        return self.peak


@pytest.mark.parametrize("gather_all", [False, True], ids=["planned", "forced"])
def test_a_save_takes_little_memory_for_a_large_model(gather_all, tmp_path):
    bucket_bytes = 8 * MIB

    def check() -> int:
        # Or glibc keeps what is freed, and a heap with holes grows.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        exporter = Exporter(many_megabytes(32 * bucket_bytes), bucket_bytes=bucket_bytes, dtype=torch.bfloat16)
        before, sampler = anonymous_bytes(), Sampler()
        sampler.start()
        exporter.save(tmp_path / "out", gather_all=gather_all, fsync=False)
        return sampler.stop() - before

    for extra in run_ranks(check, 2):
        assert extra < 5 * bucket_bytes


def test_a_memory_sink_keeps_the_last_complete_export():
    sink = MemorySink()
    Exporter(tiny()).send(sink)
    before = sink.tensors
    with pytest.raises(ExportError):
        Exporter(Flaky(tiny(), 0, 3)).send(sink)
    assert sink.tensors is before
