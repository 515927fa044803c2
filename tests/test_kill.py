"""Kill -9 of a save on two ranks, at any moment: the old checkpoint, the new one, or loudly neither; no mixture."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import hf_model, shard
from publish_faults import restore, tree
from publish_readers import INDEX, OTHERS, digest, from_files, from_pretrained
from ranks import StoreKind, run_ranks
from transformers.utils import logging

from fsdp_export import save_checkpoint
from fsdp_export.errors import ExportError
from fsdp_export.fence import heartbeat

NUM_KILLS = 50
# Far from one, which is what a norm that was not loaded has.
FIRST_VERSION = 100
SIDECARS = {"config.json", "generation_config.json", "fsdp_export.json"}


def is_sharded(version: int) -> bool:
    return version % 2 == 0


def become(model: Any, version: int) -> None:
    """Give a model values, and a config, that all tell its version."""
    model.config.rms_norm_eps = 1e-6 * version
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)


def reading_of(version: int) -> tuple[float, str]:
    """Return what `from_pretrained` must read of a version."""
    model: Any = hf_model("qwen2")
    become(model, version)
    return model.config.rms_norm_eps, digest(model.state_dict())


def save_versions(folder: Path, layout: str, version: int, progress: int, go: int) -> None:
    """On a rank, save a version, wait to be told, then save one after the other until something ends it.

    Args:
        folder: Where to.
        layout: For `models.shard`.
        version: The first version.
        progress: Where lines go that say what this rank is at.
        go: A byte is read from it after the first version.
    """

    def tell(word: str, what: object) -> None:
        os.write(progress, f"{dist.get_rank()} {word} {what}".replace("\n", " ").encode() + b"\n")

    heartbeat.BEAT_SECONDS = 0.1
    model = shard(hf_model("qwen2"), layout, 2)
    tell("pid", os.getpid())
    try:
        for current in itertools.count(version):
            become(model, current)
            tell("begin", current)
            size = "4KB" if is_sharded(current) else "5GB"
            save_checkpoint(model, folder, max_shard_size=size, timeout=60 if current == version else 3)
            tell("done", current)
            if current == version:
                os.read(go, 1)
    except ExportError as error:
        tell("error", error)


def launch(store: StoreKind, folder: Path, *args: Any) -> None:
    os.setsid()
    # What is killed cleans nothing up.
    tempfile.tempdir = str(folder.parent)
    run_ranks(save_versions, 2, folder, *args, store=store, expect_death={0, 1})


class Job:
    """A launcher and two ranks that save, in a process group of their own.

    Attributes:
        lines: What the ranks told: rank, word and the rest.
    """

    def __init__(self, folder: Path, layout: str, version: int, store: StoreKind) -> None:
        self.lines: list[list[str]] = []
        self._rest = b""
        self._output, progress = os.pipe()
        go, self._go = os.pipe()
        self._launcher = multiprocessing.get_context("fork").Process(
            target=launch, args=(store, folder, layout, version, progress, go)
        )
        with warnings.catch_warnings():
            # As in `run_ranks`.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._launcher.start()
        os.close(progress)
        os.close(go)

    def wait_for(self, word: str, number: int) -> None:
        """Read what the ranks tell until both have told this."""
        while not all([rank, word, str(number)] in self.lines for rank in ("0", "1")):
            assert self._read(), f"the job ended: {self.lines}"

    def go_on(self) -> None:
        os.write(self._go, b"..")

    def kill(self, victim: int | None) -> None:
        """Kill a rank, or everything, and wait until nothing of the job runs."""
        if victim is not None:
            os.kill(self.last("pid", victim), signal.SIGKILL)
        elif self._launcher.pid is not None:
            os.killpg(self._launcher.pid, signal.SIGKILL)
        while self._read():
            pass
        self._launcher.join()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.kill(None)
        os.close(self._output)
        os.close(self._go)

    def last(self, word: str, *ranks: int) -> int:
        """Return the greatest number that ranks, by default both, told with this word."""
        wanted = {str(rank) for rank in ranks or (0, 1)}
        return max(int(line[2]) for line in self.lines if line[0] in wanted and line[1] == word)

    def error_on(self, rank: int) -> str:
        return next(line[2] for line in self.lines if line[:2] == [str(rank), "error"])

    def _read(self) -> bool:
        """Read something; tell whether a process of the job can still write."""
        data = os.read(self._output, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode().split(" ", 2) for line in lines]
        return bool(data)


@contextmanager
def job(folder: Path, layout: str, version: int, store: StoreKind) -> Iterator[Job]:
    """Start a job that has saved a version, and leave nothing of it."""
    running = Job(folder, layout, version, store)
    try:
        running.wait_for("done", version)
        yield running
    finally:
        running.close()


def seconds_of_a_save(folder: Path, version: int) -> tuple[float, int]:
    """Return how long a save takes, on average over both formats, and the version after the last."""
    with job(folder, "dim1", version, "tcp") as running:
        begin = time.monotonic()
        running.go_on()
        running.wait_for("done", version + 6)
        seconds = (time.monotonic() - begin) / 6
        running.kill(None)
        return seconds, running.last("begin") + 1


def check_others(folder: Path) -> None:
    found = tree(folder)
    assert {name: found.get(name, b"gone") for name in OTHERS} == OTHERS


def check_holds(folder: Path, version: int) -> None:
    """Check that a folder holds a version, the other files and nothing else."""
    check_others(folder)
    names = tree(folder).keys() - OTHERS.keys() - SIDECARS
    if is_sharded(version):
        num_shards = len(names) - 1
        assert num_shards > 1
        shards = {f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)}
        assert names == {INDEX, *shards}
    else:
        assert names == {"model.safetensors"}
    assert (from_pretrained(folder), from_files(folder)) == (reading_of(version), reading_of(version)[1])


def age_of(folder: Path, old: int, new: int) -> str:
    """Tell whether readers find the old version, the new one, or only errors."""
    check_others(folder)
    ages = {reading_of(old): "old", reading_of(new): "new", None: "loud"}
    loaded, weights = from_pretrained(folder), from_files(folder)
    assert loaded in ages, f"transformers loads a mixture of {old} and {new}"
    assert weights in {None, *(reading[1] for reading in ages if reading)}, f"a mixture of {old} and {new}"
    assert loaded is None or weights is None or loaded[1] == weights
    return ages[loaded]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logging.disable_progress_bar()
    restore(tmp_path / "checkpoint", OTHERS)
    return tmp_path / "checkpoint"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_random_kills_leave_the_old_checkpoint_or_the_new_one(folder):
    chance = random.Random(2)
    seconds, version = seconds_of_a_save(folder, FIRST_VERSION)
    # Evenly over two saves: one that replaces a single file by shards, and one the other way round.
    moments = [2 * (number + chance.random()) / NUM_KILLS for number in range(NUM_KILLS)]
    chance.shuffle(moments)
    outcomes: Counter[str] = Counter()
    for number in itertools.count():
        if number >= NUM_KILLS:
            if outcomes["old"] and outcomes["new"]:
                break
            # A machine that is no longer as fast as it was.
            seconds, version = seconds_of_a_save(folder, version)
        victim, layout = (None, 0, 1)[number % 3], ("1d", "dim1")[number // 3 % 2]
        with job(folder, layout, version, "tcp" if number // 6 % 2 else "file") as running:
            # The save after a kill succeeds and is complete.
            check_holds(folder, version)
            running.go_on()
            time.sleep(seconds * moments[number % NUM_KILLS])
            running.kill(victim)
        if victim is not None:
            assert f"rank {victim}" in running.error_on(1 - victim)
        outcomes[age_of(folder, running.last("done"), running.last("begin"))] += 1
        version = running.last("begin") + 1
    print(f"a save takes {seconds:.3f} s; after a kill: {dict(outcomes)}")
