"""What every engine gets, whatever goes wrong there: all of an update or a word that it is off."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
from exports import assert_same, expected_export
from live_bytes import left_over, tensors_alive
from models import shard, tiny
from ranks import run_ranks

from fsdp_export import Exporter
from fsdp_export.errors import ExportError, SinkError, UsageError
from fsdp_export.sinks.engine import EngineSink
from fsdp_export.transfer.buckets import Bucket, BucketLayout


class Recorder(EngineSink):
    """An engine that remembers what it is told, and fails where it is asked to."""

    def __init__(self, *, bucket_bytes: int = 200, failing: str = "") -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout=5)
        self.failing = failing
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.threads: set[threading.Thread] = set()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.failing:
            raise SinkError(f"the engine failed in {call}")

    def _begin(self, layouts: Sequence[BucketLayout], cards: Sequence[str]) -> str:
        self._note("begin")
        return "ticket"

    def _connect(self, layouts: Sequence[BucketLayout], ticket: str) -> None:
        self._note(f"connect {ticket}")

    def _send(self, bucket: Bucket) -> None:
        self.threads.add(threading.current_thread())
        self.weights |= {name: value.clone() for name, value in bucket.tensors()}
        self._note("send" if len(bucket.entries) != 1 or bucket.entries[0].info.name != "table" else "send table")

    def _end(self) -> None:
        self._note("end")

    def _commit(self) -> None:
        self._note(f"commit {self.next_version}")

    def _cancel(self) -> None:
        self._note("cancel")


@pytest.mark.parametrize("everywhere", [False, True], ids=["one sends", "all send"])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_updates_bring_what_the_module_has_at_the_time(bucket_bytes, everywhere):
    def check() -> list[str]:
        model, sink = shard(tiny(), "1d", 3), Recorder(bucket_bytes=bucket_bytes)
        sink.sends_everywhere = everywhere
        exporter, expected = Exporter(model), expected_export(tiny())
        for update in range(3):
            exporter.send(sink)
            assert sink.num_updates == (update + 1 if "begin" in sink.calls else 0)
            if "begin" in sink.calls or everywhere:
                assert_same({name: sink.weights[name] for name in expected}, expected)
            else:
                assert not sink.weights
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            expected = {
                name: value + 1 if name not in {"count", "table"} else value for name, value in expected.items()
            }
        assert all(not thread.is_alive() for thread in sink.threads)
        return [call for call in sink.calls if not call.startswith("send")]

    first, *others = run_ranks(check, 3)
    assert first == [c for n in (1, 2, 3) for c in ("begin", "connect ticket", "end", f"commit {n}")]
    assert others == [[c for _ in range(3) for c in ("connect ticket", "end")] if everywhere else []] * 2


@pytest.mark.parametrize("failing", ["begin", "connect ticket", "send", "send table", "end", "commit 1"])
def test_an_engine_that_fails_is_an_error_on_all_ranks_and_the_next_update_succeeds(failing):
    def check() -> None:
        sink = Recorder(bucket_bytes=1, failing=failing)
        exporter = Exporter(shard(tiny(), "1d", 3))
        with pytest.raises(SinkError, match=f"the engine failed in {failing}"):
            exporter.send(sink)
        assert sink.calls[-1] == "cancel"
        assert sink.num_updates == 0
        sink.failing = ""
        exporter.send(sink)
        if sink.weights:
            expected = expected_export(tiny())
            assert_same({name: sink.weights[name] for name in expected}, expected)
            assert sink.calls[-1] == "commit 1"

    run_ranks(check, 3)


@pytest.mark.parametrize("failing", ["send", "send table", "end", "commit 1"])
def test_a_failed_update_keeps_no_memory_until_a_collection(failing):
    def check() -> None:
        sink = Recorder(bucket_bytes=1, failing=failing)
        exporter = Exporter(shard(tiny(), "1d", 2), bucket_bytes=1)
        gc.collect()
        gc.disable()
        before = {id(each) for each in tensors_alive()}
        with suppress(SinkError):
            exporter.send(sink)
        sink.weights.clear()
        assert left_over(before) == []

    run_ranks(check, 2)


def test_a_rank_that_fails_within_an_update_cancels_it():
    def check() -> list[str]:
        class Failing(Recorder):
            def write(self, piece):
                super().write(piece)
                if not self.is_lead and piece.info.name == "two_rows":
                    raise ValueError("out of luck")

        sink = Failing(bucket_bytes=1)
        exporter = Exporter(shard(tiny(), "1d", 3), bucket_bytes=1)
        with pytest.raises(ExportError, match="out of luck"):
            exporter.send(sink)
        return sink.calls

    calls, *_ = run_ranks(check, 3)
    assert calls[:2] == ["begin", "connect ticket"]
    assert calls[-1] == "cancel"
    assert "end" not in calls


def test_a_slow_engine_holds_no_more_than_two_buckets():
    held: list[int] = []

    class Slow(Recorder):
        def _send(self, bucket: Bucket) -> None:
            held.append(bucket.buffer.untyped_storage().data_ptr())
            super()._send(bucket)

    Exporter(tiny()).send(Slow(bucket_bytes=1))
    assert len(held) > 4
    assert len(set(held)) == 2


@pytest.mark.parametrize("options", [{"bucket_bytes": 0, "timeout": 1}, {"bucket_bytes": 1, "timeout": 0}])
def test_options_that_cannot_work(options):
    with pytest.raises(UsageError):
        EngineSink(**options)
