"""Saves behind the training loop: values of the call, errors that reach everybody, ends of all kinds."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from faults import before_call, check_complete, layered, make_old_export, outcome_of
from models import hf_model, shard, tiny
from publish_faults import tree
from ranks import free_port, run_ranks
from safetensors.torch import load_file
from torch import nn

from fsdp_export import Exporter, MemorySink, PendingSave, collectives, pending, save_checkpoint
from fsdp_export.errors import RankError, SinkError, UsageError
from fsdp_export.fence import heartbeat
from fsdp_export.sinks.files import FileSink
from fsdp_export.sinks.staged import StagedSink

HOST = socket.gethostname()
HERE = Path(__file__).parent
PLAIN: dict[str, Any] = {"format": "safetensors", "fsync": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier export."""
    make_old_export(tmp_path / "export")
    return tmp_path / "export"


class Gate:
    """Holds the first save of this process between the call and the write until it is opened."""

    def __init__(self) -> None:
        self._is_open, self.is_reached = threading.Event(), threading.Event()
        before_call(StagedSink, "deliver", self._wait)

    def _wait(self) -> None:
        self.is_reached.set()
        assert self._is_open.wait(60)

    def open(self) -> None:
        self._is_open.set()


def save_later(model: nn.Module | Exporter, folder: Path, **options: Any) -> PendingSave:
    exporter = model if isinstance(model, Exporter) else Exporter(model)
    return exporter.save(folder, blocking=False, **PLAIN, **options)


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_saved(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    saved = saved_in(folder)
    assert_same({name: saved.pop(name) for name in expected}, expected)
    assert not saved
    assert not list(folder.glob(".*"))


def trained(steps: int) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Return a whole model after some steps, and what makes one more of a model, sharded or not."""

    def step(model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.ones_like(parameter) * (number + 1)
        torch.optim.SGD(model.parameters(), lr=0.125).step()

    model = tiny()
    for _ in range(steps):
        step(model)
    return model, step


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("layout", ["1d", "dim1"])
def test_values_are_those_of_the_call_whatever_the_optimizer_does_next(layout, dtype, tmp_path):
    def check() -> None:
        gate = Gate()
        model: Any = shard(tiny(), layout, 2)
        exporter, step = Exporter(model, dtype=dtype, bucket_bytes=200), trained(0)[1]
        for number in range(3):
            handle = save_later(exporter, tmp_path / str(number))
            step(model)
            if number == 0:
                assert not handle.done()
                with torch.no_grad():
                    model.count.add_(1)
                gate.open()
        handle.wait()

    run_ranks(check, 2)
    for number in range(3):
        model: Any = trained(number)[0]
        with torch.no_grad():
            model.count.add_(min(number, 1))
        expected = {
            name: value.to(torch.bfloat16) if dtype != "keep" and value.is_floating_point() else value
            for name, value in expected_export(model).items()
        }
        assert_saved(tmp_path / str(number), expected)


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "hugging-face"])
def test_the_module_may_be_freed_before_it_is_written(wraps, tmp_path):
    def check() -> None:
        gate = Gate()
        model = shard(hf_model("qwen2") if wraps else tiny(), "dim1", 2)
        handle = save_checkpoint(model, tmp_path / "out", blocking=False)
        left = weakref.ref(model)
        del model
        gc.collect()
        assert left() is None
        assert gate.is_reached.wait(60)
        gate.open()
        report = handle.wait()
        assert report.path == tmp_path / "out"
        assert (report.files != {}) == (dist.get_rank() == 0)

    run_ranks(check, 2)
    expected = expected_export(hf_model("qwen2") if wraps else tiny())
    saved = saved_in(tmp_path / "out")
    assert_same({name: saved[name] for name in expected}, expected)
    assert (tmp_path / "out" / "config.json").exists() == wraps


def test_the_config_is_that_of_the_call(tmp_path, monkeypatch):
    # What the gate sets is taken back.
    monkeypatch.setattr(StagedSink, "deliver", StagedSink.deliver)
    gate = Gate()
    model: Any = hf_model("llama")
    Exporter(model).save(tmp_path / "before")
    handle = save_checkpoint(model, tmp_path / "out", blocking=False)
    model.config.rms_norm_eps = 0.5
    assert gate.is_reached.wait(60)
    gate.open()
    handle.wait()
    assert tree(tmp_path / "out") == tree(tmp_path / "before")


def test_no_collective_is_used_behind_the_loop_which_goes_on_with_its_own(tmp_path, monkeypatch):
    """Also exports of the same ranks, with the same exporter or another one, while a save is written."""
    threads: set[str] = set()
    original = collectives.all_gather_into

    def spy(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(*args, **options)

    monkeypatch.setattr(collectives, "all_gather_into", spy)

    def check() -> set[str]:
        gate = Gate()
        model = shard(tiny(), "dim1", 2)
        exporter = Exporter(model, bucket_bytes=200)
        handle = save_later(exporter, tmp_path / "out")
        assert gate.is_reached.wait(60)
        expected = expected_export(tiny())
        for other in (exporter, Exporter(model)):
            stream = other.tensors()
            first = [next(stream)]
            if other is exporter:
                gate.open()
            assert_same(dict([*first, *stream]), expected)
            sink = MemorySink()
            other.send(sink)
            assert_same(sink.tensors, expected)
            total = torch.ones(())
            dist.all_reduce(total)
            assert total == 2
        handle.wait()
        return threads

    assert run_ranks(check, 2) == [{"MainThread"}] * 2
    assert_saved(tmp_path / "out", expected_export(tiny()))


def test_what_is_known_at_the_call_is_raised_there(folder, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").touch()
    (tmp_path / "file").touch()
    before = tree(tmp_path)

    def check() -> None:
        exporter = Exporter(shard(layered(), "1d", 2))
        with pytest.raises(UsageError, match="no such staging: expected auto, device or host, found 'gpu'"):
            save_later(exporter, folder, staging="gpu")
        with pytest.raises(UsageError, match="no such format"):
            exporter.save(folder, blocking=False, format="onnx")
        with pytest.raises(SinkError, match="weights that no export recorded"):
            save_later(exporter, tmp_path / "foreign")
        with pytest.raises(SinkError, match="a file stands where a folder is needed"):
            save_later(exporter, tmp_path / "file")
        with pytest.raises(Exception, match=r"do not agree|differ"):
            save_later(Exporter(exporter._model, dtype=("keep", "bfloat16")[dist.get_rank()]), folder)
        with pytest.raises(Exception, match="the ranks call different things"):
            exporter.save(folder, blocking=dist.get_rank() == 0, **PLAIN)
        dist.barrier()

    run_ranks(check, 2)
    assert tree(tmp_path) == before


def test_an_error_of_one_rank_in_the_background_is_that_of_all(folder):
    before = tree(folder)

    def check() -> list[str]:
        gate = Gate()
        exporter = Exporter(shard(layered(), "1d", 2))
        handle = save_later(exporter, folder)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        gate.open()
        errors = [str(outcome_of(handle.wait)[:2]) for _ in range(2)]
        assert handle.done()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        assert tree(folder) == before
        dist.barrier()
        # Whoever waited was told.
        save_later(exporter, folder).wait()
        return [*errors, repr(handle)]

    # The limit would hold for a store that is a file, too.
    one, other = run_ranks(check, 2, store="tcp")
    assert one == other
    assert one[0] == one[1]
    assert "('SinkError', 'rank 1" in one[0]
    assert f"({HOST}): cannot write " in one[0]
    assert "(File too large) in" in one[0]
    assert "Raise the limit on file sizes (ulimit -f), or choose a smaller max_shard_size; an earlier export" in one[0]
    assert one[2] == f"<save into {folder}, failed>"
    check_complete(folder)


@pytest.mark.parametrize("who_waited", ["nobody", "the-first-rank"])
@pytest.mark.parametrize("blocking", [False, True], ids=["later", "blocking"])
def test_an_error_nobody_waited_for_is_raised_by_the_next_save_on_all_ranks(folder, blocking, who_waited):
    before = tree(folder)

    def check() -> str:
        model = shard(layered(), "1d", 2)
        if dist.get_rank():
            before_call(FileSink, "write", lambda: 1 / 0)
        handle = save_later(model, folder)
        if who_waited != "nobody" and dist.get_rank() == 0:
            with pytest.raises(RankError):
                handle.wait()
        _, text = outcome_of(lambda: save_checkpoint(model, folder, blocking=blocking, **PLAIN))
        dist.barrier()
        assert tree(folder) == before
        dist.barrier()
        save_later(model, folder).wait()
        return text

    one, other = run_ranks(check, 2)
    text = f"the last save in the background, into {folder}, failed: "
    text += f"rank 1 ({HOST}): ZeroDivisionError: division by zero"
    assert one == other == (text if who_waited == "nobody" else f"rank 1 ({HOST}): {text}")
    check_complete(folder)


@pytest.mark.parametrize("second", ["same-exporter", "other-exporter", "blocking"])
def test_a_second_save_waits_for_the_first(second, tmp_path):
    def check() -> None:
        gate = Gate()
        model = shard(tiny(), "1d", 2)
        exporter = Exporter(model)
        handle = save_later(exporter, tmp_path / "first")
        done: list[bool] = []
        before_call(FileSink, "open", lambda: done.append(handle.done()))
        assert not handle.done()
        with pytest.raises(TimeoutError, match=r"first is not complete after 0.01 s"):
            handle.wait(0.01)
        threading.Timer(0.3, gate.open).start()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        other = exporter if second == "same-exporter" else Exporter(model)
        if second == "blocking":
            other.save(tmp_path / "second", **PLAIN)
        else:
            save_later(other, tmp_path / "second").wait()
        assert done == [True]

    run_ranks(check, 2)
    assert_saved(tmp_path / "first", expected_export(tiny()))
    doubled = tiny()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    assert_saved(tmp_path / "second", expected_export(doubled))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes_leaves_the_old_checkpoint(victim, folder, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.15)
    before = tree(folder)

    def check() -> tuple[str, str]:
        model = shard(layered(), "1d", 2)
        if dist.get_rank() == victim:
            before_call(FileSink, "write", lambda: os.kill(os.getpid(), signal.SIGKILL), number=1)
        handle = save_later(model, folder)
        return outcome_of(handle.wait)[:2]

    kind, text = run_ranks(check, 2, expect_death={victim})[1 - victim]
    assert (kind, text.startswith(f"rank {victim} ({HOST}): no sign of life")) == ("RankError", True)
    left = {name: data for name, data in tree(folder).items() if not name.startswith(".fsdp-export-writing")}
    assert left == before
    save_later(layered(), folder).wait()
    check_complete(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_store_that_the_first_rank_hosts_outlives_the_process_group(tmp_path):
    def check() -> None:
        gate = Gate()
        handle = save_later(shard(layered(), "1d", 2), tmp_path / "out")
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        gate.open()
        handle.wait()

    run_ranks(check, 2, store="tcp")
    check_complete(tmp_path / "out")


def test_a_script_that_ends_without_waiting_has_saved(tmp_path):
    """The first rank, which hosts the store, destroys the group and ends with an error, the other one exits later."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "leave_async.py"), str(tmp_path / "out")],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 3], texts
    check_complete(tmp_path / "out")


def test_an_error_nobody_waited_for_is_logged_as_the_program_ends(tmp_path):
    def end() -> None:
        logging.getLogger("fsdp_export").addHandler(logging.FileHandler(tmp_path / "log"))
        before_call(FileSink, "write", lambda: 1 / 0)
        save_later(layered(), tmp_path / "out")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        program = multiprocessing.get_context("fork").Process(target=end)
        program.start()
    program.join()
    text = f"the last save in the background, into {tmp_path / 'out'}, failed: division by zero"
    assert (tmp_path / "log").read_text() == text + "\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_forked_process_leaves_the_save_to_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(StagedSink, "deliver", StagedSink.deliver)
    gate = Gate()
    handle = save_later(layered(), tmp_path / "out")
    assert gate.is_reached.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        # If it waited, it would for ever.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        pending.finish_latest()
        save_later(layered(), tmp_path / "child").wait()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not handle.done()
    gate.open()
    assert handle.wait().num_tensors == 6
    for name in ("out", "child"):
        check_complete(tmp_path / name)


def test_a_fork_that_sets_one_thread_is_not_given_more(tmp_path):
    """OpenMP waits forever in a fork of a process that had several threads of it."""
    torch.set_num_threads(max(2, torch.get_num_threads()))
    assert (torch.ones(1 << 21) * 2).sum() == 1 << 22

    def check() -> None:
        assert torch.get_num_threads() == 1
        save_later(nn.Linear(1024, 1024, bias=False), tmp_path / "out").wait()

    run_ranks(check, 1)
    assert saved_in(tmp_path / "out")["weight"].shape == (1024, 1024)


def test_the_handle_tells_what_was_written_as_a_blocking_save_does(tmp_path, caplog):
    delivered: list[int] = []
    exporter = Exporter(hf_model("qwen2"))
    with caplog.at_level(logging.WARNING):
        report = exporter.save(tmp_path / "later", blocking=False, delivered=delivered.append).wait()
    expected = exporter.save(tmp_path / "now")
    assert (report.files, report.notes, report.what) == (expected.files, expected.notes, expected.what)
    assert sum(delivered) == report.num_bytes == exporter.plan.num_bytes
    assert tree(tmp_path / "later") == tree(tmp_path / "now")
    assert caplog.messages == []


@pytest.mark.parametrize("layout", ["1d", "dim1"])
def test_memory_of_a_save_in_inference_mode_serves_the_next_one(layout, tmp_path):
    def check() -> None:
        exporter = Exporter(shard(tiny(), layout, 2), bucket_bytes=200)
        with torch.inference_mode():
            save_later(exporter, tmp_path / "first").wait()
            dict(exporter.tensors())
        save_later(exporter, tmp_path / "second").wait()

    run_ranks(check, 2)
    for name in ("first", "second"):
        assert_saved(tmp_path / name, expected_export(tiny()))


def test_saves_of_several_threads_do_not_share_memory(tmp_path):
    models = {number: nn.Linear(64, 64, bias=False) for number in range(3)}
    both = threading.Barrier(len(models))

    def save(number: int, model: nn.Linear) -> None:
        exporter = Exporter(model)
        for step in range(8):
            with torch.no_grad():
                model.weight.fill_(10 * step + number)
            both.wait(60)
            save_later(exporter, tmp_path / f"{number}-{step}")

    with ThreadPoolExecutor(len(models)) as threads:
        for future in [threads.submit(save, *item) for item in models.items()]:
            future.result(60)
    pending.wait_for_latest()
    for number in models:
        for step in range(8):
            assert (saved_in(tmp_path / f"{number}-{step}")["weight"] == 10 * step + number).all()


def test_a_save_that_is_called_by_one_in_the_background_is_an_error(tmp_path):
    model = layered()
    handle = save_later(model, tmp_path / "out", published=lambda _: save_later(model, tmp_path / "other"))
    with pytest.raises(UsageError, match="a save was called within another save"):
        handle.wait(60)
    check_complete(tmp_path / "out")
    save_later(model, tmp_path / "other").wait()
