"""One rank's trouble is every rank's error, in seconds; the old checkpoint stays, and the group works afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from exports import assert_same
from faults import (
    NUM_RANKS,
    Outcome,
    before_call,
    export_again,
    export_with_fault,
    layered,
    make_old_export,
    outcome_of,
    the_error,
)
from models import hf_model, shard
from publish_faults import tree
from ranks import run_ranks
from safetensors.torch import load_file

from fsdp_export import Exporter, save_checkpoint
from fsdp_export.errors import SinkError
from fsdp_export.sinks.base import MemorySink
from fsdp_export.sinks.files import FileSink

HOST = socket.gethostname()
WIDE = 150


class Export(NamedTuple):
    """A way to export six tensors: held, gathered (the matrices), all gathered, to every rank, in the caller's loop."""

    name: str
    layout: str
    call: Callable[[Exporter, FileSink], object] = Exporter.send

    def __str__(self) -> str:
        return self.name


EXPORTS = (
    Export("held", "1d"),
    Export("gathered", "dim1"),
    Export("forced", "1d", partial(Exporter.send, gather_all=True)),
    Export("everywhere", "dim1", lambda exporter, _: exporter.send(MemorySink())),
    Export("iterated", "dim1", lambda exporter, _: list(exporter.tensors())),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier export."""
    make_old_export(tmp_path / "export")
    return tmp_path / "export"


def fail() -> None:
    raise ValueError("out of luck")


def refuse() -> None:
    raise SinkError("the other end hung up")


def on(rank: int, inject: Callable[[Exporter, FileSink], object]) -> Callable[[Exporter, FileSink], None]:
    """Prepare a fault on one rank."""

    def inject_there(exporter: Exporter, sink: FileSink) -> None:
        if dist.get_rank() == rank:
            inject(exporter, sink)

    return inject_there


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("number", [0, 3, 5], ids=["first", "middle", "last"])
@pytest.mark.parametrize("export", EXPORTS, ids=str)
def test_a_source_that_raises(folder, export, number, rank):
    inject = on(rank, lambda exporter, _: before_call(exporter.source, "rows", fail, number=number))
    outcomes = export_with_fault(folder, inject, layout=export.layout, export=export.call)
    assert the_error(outcomes) == ("RankError", f"rank {rank} ({HOST}): ValueError: out of luck")


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("number", [0, 3], ids=["first", "fourth"])
@pytest.mark.parametrize("layout", ["1d", "dim1"])
def test_a_sink_that_raises_in_write(folder, layout, number, rank):
    inject = on(rank, lambda _, sink: before_call(sink, "write", refuse, number=number))
    outcomes = export_with_fault(folder, inject, layout=layout)
    assert the_error(outcomes) == ("SinkError", f"rank {rank} ({HOST}): the other end hung up")


@pytest.mark.parametrize(
    ("method", "rank"),
    [("begin", 0), ("commit", 0), *((method, rank) for method in ("open", "close") for rank in range(NUM_RANKS))],
)
def test_a_sink_that_raises(folder, method, rank):
    outcomes = export_with_fault(folder, on(rank, lambda _, sink: before_call(sink, method, refuse)))
    assert the_error(outcomes) == ("SinkError", f"rank {rank} ({HOST}): the other end hung up")


def test_two_ranks_that_raise(folder):
    both = multiprocessing.get_context("fork").Barrier(2)

    def inject(exporter: Exporter, sink: FileSink) -> None:
        if dist.get_rank():
            before_call(exporter.source, "rows", both.wait)
            before_call(sink, "write", fail)

    kind, text = the_error(export_with_fault(folder, inject))
    assert (kind, text) == ("RankError", f"ranks 1, 2 (host {HOST}): ValueError: out of luck")


def test_all_ranks_that_raise(folder):
    everyone = multiprocessing.get_context("fork").Barrier(NUM_RANKS)

    def inject(_: Exporter, sink: FileSink) -> None:
        before_call(sink, "close", refuse)
        before_call(sink, "close", everyone.wait)

    assert the_error(export_with_fault(folder, inject)) == ("SinkError", "the other end hung up")


def limit_file_size(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("layout", ["1d", "dim1"])
def test_a_file_larger_than_a_rank_may_write(folder, layout, rank):
    size = (folder / "model.safetensors").stat().st_size

    def inject(_: Exporter, sink: FileSink) -> None:
        # Every rank has rows that lie further back.
        limit_file_size(size - 600)
        before_call(sink, "abort", lambda: limit_file_size(resource.RLIM_INFINITY))

    kind, text = the_error(export_with_fault(folder, on(rank, inject), layout=layout, store="tcp"))
    message = rf"cannot write [\d,]+ bytes \(File too large\) in {folder}/model\.safetensors\. .* is intact\."
    assert kind == "SinkError"
    assert re.fullmatch(rf"rank {rank} \({HOST}\): {message}", text)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB with an export of 1.6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False).returncode:
        pytest.skip("this user may not mount a disk")
    make_old_export(disk / "export", WIDE)
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path, *, but: int = 0) -> None:
    """Leave no more than a number of free bytes."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        stats = os.statvfs(disk)
        file.write(bytes(stats.f_bavail * stats.f_frsize - but))
        while not but:
            file.write(bytes(4096))


def test_a_disk_with_too_little_space(disk):
    def inject(_: Exporter, sink: FileSink) -> None:
        if dist.get_rank() == 0:
            fill(disk, but=1 << 20)
            before_call(sink, "abort", (disk / "filler").unlink)

    kind, text = the_error(export_with_fault(disk / "export", inject, width=WIDE))
    size = (disk / "export" / "model.safetensors").stat().st_size
    free = (1 << 20) - 2 * 4096
    message = (
        f"too little free space in {disk}/export: expected {size:,} bytes, found {free:,} bytes."
        " Free some space, or write elsewhere; an earlier export there is intact."
    )
    assert (kind, text) == ("SinkError", f"rank 0 ({HOST}): {message}")


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("layout", ["1d", "dim1"])
def test_a_disk_that_runs_full_while_weights_are_written(disk, layout, rank):
    def inject(_: Exporter, sink: FileSink) -> None:
        if dist.get_rank() == rank:
            before_call(sink, "write", lambda: fill(disk), number=1)
        if dist.get_rank() == 0:
            before_call(sink, "abort", (disk / "filler").unlink)

    kind, text = the_error(export_with_fault(disk / "export", inject, layout=layout, width=WIDE))
    assert kind == "SinkError"
    assert re.search(
        rf"cannot write [\d,]+ bytes \(No space left on device\) in {disk}/export/model\.safetensors", text
    )


def test_a_disk_that_runs_full_before_the_publication(disk):
    def inject(_: Exporter, sink: FileSink) -> None:
        before_call(sink, "commit", lambda: fill(disk))
        before_call(sink, "abort", (disk / "filler").unlink)

    kind, text = the_error(export_with_fault(disk / "export", on(0, inject), width=WIDE))
    assert kind == "SinkError"
    assert re.search(rf"No space left on device.* in {disk}/export/fsdp_export\.json\. ", text)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_disk_that_does_not_keep_what_was_written(folder, rank):
    def close_early(sink: FileSink) -> None:
        for file in sink._files.values():
            os.dup2(os.pipe()[1], file)  # A pipe cannot be synced.

    inject = on(rank, lambda _, sink: before_call(sink, "close", lambda: close_early(sink)))
    kind, text = the_error(export_with_fault(folder, inject, fsync=True))
    assert kind == "SinkError"
    assert re.match(rf"rank {rank} \({HOST}\): .*\(Invalid argument\) in {folder}/model\.safetensors\. ", text)


def test_a_folder_that_another_rank_does_not_see(folder):
    def inject(_: Exporter, sink: FileSink) -> None:
        vars(sink)["_sees"] = lambda _: False
        before_call(sink, "abort", lambda: delattr(sink, "_sees"))

    kind, text = the_error(export_with_fault(folder, on(1, inject)))
    message = (
        f"{HOST} does not see what rank 0 made in {folder}."
        " Write to one folder that all hosts share, and in the same order on every rank."
    )
    assert (kind, text) == ("SinkError", f"rank 1 ({HOST}): {message}")


def test_ranks_that_are_told_different_folders(folder, tmp_path):
    def inject(_: Exporter, sink: FileSink) -> None:
        sink.folder = tmp_path / "elsewhere"
        before_call(sink, "abort", lambda: setattr(sink, "folder", folder))

    kind, text = the_error(export_with_fault(folder, on(1, inject)))
    message = (
        f"{HOST} does not see what rank 0 made in {folder}: found {tmp_path}/elsewhere as the folder to write here."
        " Write to one folder that all hosts share, and in the same order on every rank."
    )
    assert (kind, text) == ("SinkError", f"rank 1 ({HOST}): {message}")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize(
    ("export", "error"), [*((export, KeyboardInterrupt) for export in EXPORTS), (EXPORTS[0], SystemExit)], ids=str
)
def test_a_rank_that_is_interrupted(folder, export, error, rank):
    def interrupt() -> None:
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        sys.exit(3)

    inject = on(rank, lambda exporter, _: before_call(exporter.source, "rows", interrupt, number=3))
    outcomes = export_with_fault(folder, inject, layout=export.layout, export=export.call)
    assert outcomes.pop(rank).kind == error.__name__
    assert the_error(outcomes) == ("RankError", f"rank {rank} ({HOST}): interrupted by {error.__name__}")


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_that_is_interrupted_while_it_waits_for_another(folder, rank):
    is_interrupted = multiprocessing.get_context("fork").Event()

    def inject(exporter: Exporter, _: FileSink) -> None:
        if dist.get_rank() == (rank + 1) % NUM_RANKS:
            before_call(exporter.source, "rows", is_interrupted.wait)
        if dist.get_rank() == rank:
            timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
            before_call(exporter.source, "rows", timer.start)

    def export(exporter: Exporter, sink: FileSink) -> None:
        try:
            exporter.send(sink)
        except KeyboardInterrupt:
            is_interrupted.set()
            raise

    outcomes = export_with_fault(folder, inject, export=export)
    assert outcomes.pop(rank).kind == "KeyboardInterrupt"
    assert the_error(outcomes) == ("RankError", f"rank {rank} ({HOST}): interrupted by KeyboardInterrupt")


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_loop_over_tensors_that_one_rank_leaves(folder, number, rank):
    def loop(exporter: Exporter, sink: FileSink) -> None:
        for index, _ in enumerate(exporter.tensors(), 1):
            if dist.get_rank() == rank and index == number:
                break

    outcomes = export_with_fault(folder, lambda *_: None, export=loop)
    assert outcomes.pop(rank).kind == "ok"
    assert the_error(outcomes) == ("RankError", f"rank {rank} ({HOST}): stopped early")


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "export").write_text("a file")

    def on_rank() -> Outcome:
        exporter = Exporter(shard(layered(), "1d", NUM_RANKS))
        outcome = outcome_of(lambda: exporter.save(tmp_path / "export"))
        dist.barrier()
        export_again(exporter, FileSink(tmp_path / "elsewhere"))
        return outcome

    kind, text = the_error(run_ranks(on_rank, NUM_RANKS))
    message = f"a file stands where a folder is needed in {tmp_path}/export. Remove it, or export into another folder."
    assert (kind, text) == ("SinkError", f"rank 0 ({HOST}): {message}")
    assert (tmp_path / "export").read_text() == "a file"


def test_weights_that_we_did_not_write(folder):
    (folder / "fsdp_export.json").unlink()
    before = tree(folder)

    def on_rank() -> Outcome:
        exporter = Exporter(shard(layered(), "1d", NUM_RANKS))
        outcome = outcome_of(lambda: exporter.save(folder))
        dist.barrier()
        assert tree(folder) == before
        dist.barrier()
        export_again(exporter, FileSink(folder, overwrite=True))
        return outcome

    kind, text = the_error(run_ranks(on_rank, NUM_RANKS))
    assert kind == "SinkError"
    assert "model.safetensors" in text
    assert "overwrite=True" in text


class UnsavableTokenizer:
    """A tokenizer that cannot be saved."""

    def save_pretrained(self, folder: str) -> None:
        raise ImportError("sentencepiece is not installed")


class HugeTokenizer:
    """A tokenizer with a file that is then larger than what the process may write."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_bytes(bytes(1 << 20))
        (Path(folder) / "tokenizer_config.json").write_text("{}")
        limit_file_size(1 << 18)


def save_with_tokenizer(folder: Path, tokenizer: object) -> list[str]:
    """Save a model with a tokenizer, check the weights, and return the notes of the first rank."""

    def on_rank() -> list[str]:
        return list(save_checkpoint(shard(hf_model("qwen2"), "1d", 2), folder, tokenizer=tokenizer).notes)

    notes: list[str] = run_ranks(on_rank, 2)[0]
    model = hf_model("qwen2")
    expected, saved = model.state_dict(), load_file(folder / "model.safetensors")
    assert_same({name: saved.pop(name) for name in expected}, expected)
    assert json.loads((folder / "config.json").read_bytes())["model_type"] == "qwen2"
    return notes


def test_a_tokenizer_that_cannot_be_saved(tmp_path):
    notes = save_with_tokenizer(tmp_path / "export", UnsavableTokenizer())
    assert "tokenizer was not written: sentencepiece is not installed" in notes


def test_a_tokenizer_file_that_cannot_be_written(tmp_path):
    folder = tmp_path / "export"
    notes = save_with_tokenizer(folder, HugeTokenizer())
    assert "tokenizer.json was not written: File too large" in notes
    assert not (folder / "tokenizer.json").exists()
    assert (folder / "tokenizer_config.json").read_text() == "{}"
    assert "tokenizer.json" not in json.loads((folder / "fsdp_export.json").read_bytes())["files"]
