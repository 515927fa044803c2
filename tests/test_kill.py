"""Kill -9 of a save on two ranks, at any moment: the old checkpoint, the new one, or loudly neither; never a mixture."""

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import hf_model, shard
from publish_faults import restore, tree
from publish_readers import INDEX, OTHERS, digest, from_files, from_pretrained
from ranks import run_ranks
from transformers.utils import logging

from fsdp_export import save_checkpoint
from fsdp_export.errors import ExportError
from fsdp_export.fence import heartbeat

NUM_KILLS = 50
# Ends a rank's report of a save; values start far from 1, which is what a fresh norm has.
FIRST_VERSION = 100
SIDECARS = {"config.json", "generation_config.json", "fsdp_export.json"}

Reading = tuple[float, str]


def is_sharded(version: int) -> bool:
    return version % 2 == 0


def make_version(version: int, model: torch.nn.Module) -> None:
    """Make a version whose every value tells its number."""
    model.config.rms_norm_eps = 1e-6 * version
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)


def reading_of(version: int) -> Reading:
    model = hf_model("qwen2")
    make_version(version, model)
    return model.config.rms_norm_eps, digest(model.state_dict())


def save_versions(folder: Path, layout: str, version: int, progress: int, go: int) -> None:
    """Save a version, wait to be told, and save one after the other for ever."""

    def tell(*words: object) -> None:
        os.write(progress, (" ".join(map(str, (dist.get_rank(), *words))).replace("\n", " ") + "\n").encode())

    heartbeat.BEAT_SECONDS = 0.1
    model = shard(hf_model("qwen2"), layout, 2)
    tell("pid", os.getpid())
    try:
        for current in itertools.count(version):
            make_version(current, model)
            tell("begin", current)
            save_checkpoint(model, folder, max_shard_size="4KB" if is_sharded(current) else "5GB")
            tell("done", current)
            if current == version:
                os.read(go, 1)
    except ExportError as error:
        tell("error", error)


class Job:
    """A launcher and two ranks that save, in a process group of their own."""

    def __init__(self, folder: Path, layout: str, version: int) -> None:
        self._output, progress = os.pipe()
        go, self._go = os.pipe()
        self.lines: list[list[str]] = []
        self._rest = b""
        self._launcher = multiprocessing.get_context("fork").Process(
            target=self._launch, args=(folder, layout, version, progress, go)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._launcher.start()
        os.close(progress)
        os.close(go)

    @staticmethod
    def _launch(*args: Any) -> None:
        os.setsid()
        tempfile.tempdir = str(args[0].parent)
        run_ranks(save_versions, 2, *args, expect_death={0, 1})

    def go_on(self) -> None:
        os.write(self._go, b"..")

    def wait_for(self, *line: object) -> None:
        """Read what the ranks tell until both have told this."""
        wanted = [[str(rank), *map(str, line)] for rank in range(2)]
        while not all(one in self.lines for one in wanted):
            assert self._read(), f"the job ended: {self.lines}"

    def kill(self, victim: int | None) -> None:
        """Kill a rank, or everything, and wait until nothing of the job runs."""
        if victim is None:
            os.killpg(self._launcher.pid, signal.SIGKILL)
        else:
            os.kill(
                next(int(pid) for rank, word, pid in self.lines if (rank, word) == (str(victim), "pid")), signal.SIGKILL
            )
        while self._read():
            pass
        self._launcher.join()
        os.close(self._output)
        os.close(self._go)

    def last(self, word: str) -> int:
        return max(int(line[2]) for line in self.lines if line[1] == word)

    def errors(self) -> dict[int, str]:
        return {int(line[0]): " ".join(line[2:]) for line in self.lines if line[1] == "error"}

    def _read(self) -> bool:
        data = os.read(self._output, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode().split() for line in lines]
        return bool(data)


def seconds_of_a_save(folder: Path, version: int) -> tuple[float, int]:
    """Return how long a save takes, sharded or not, and the next version."""
    job = Job(folder, "dim1", version)
    job.wait_for("done", version)
    job.go_on()
    num_saves = 6
    begin = time.monotonic()
    job.wait_for("done", version + num_saves)
    seconds = time.monotonic() - begin
    job.kill(None)
    return seconds / num_saves, job.last("begin") + 1


def check_complete(folder: Path, version: int) -> None:
    """Check that the folder holds this version, the other files, and nothing else."""
    names = set(tree(folder)) - set(OTHERS) - SIDECARS
    if is_sharded(version):
        num_shards = len(names) - 1
        assert num_shards > 1
        shards = {f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)}
        assert names == {INDEX, *shards}
    else:
        assert names == {"model.safetensors"}
    assert readings(folder) == (reading_of(version), reading_of(version)[1])
    check_others(folder)


def check_others(folder: Path) -> None:
    found = tree(folder)
    assert {name: found.get(name, "gone") for name in OTHERS} == OTHERS


def readings(folder: Path) -> tuple[Reading | None, str | None]:
    return from_pretrained(folder), from_files(folder)


def age_of_what_loads(folder: Path, old: int, new: int) -> str:
    check_others(folder)
    loaded, read = readings(folder)
    ages = {reading_of(old): "old", reading_of(new): "new", None: "loud"}
    assert loaded in ages, f"transformers loads a mixture of {old} and {new}"
    assert read in {reading_of(old)[1], reading_of(new)[1], None}, f"the files are a mixture of {old} and {new}"
    assert loaded is None or read is None or loaded[1] == read
    return ages[loaded]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logging.disable_progress_bar()
    folder = tmp_path / "checkpoint"
    restore(folder, OTHERS)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_random_kills_leave_the_old_checkpoint_or_the_new_one(folder):
    chance = random.Random(2)
    seconds, version = seconds_of_a_save(folder, FIRST_VERSION)
    # Evenly over two saves: one that replaces a single file by shards, one the other way round.
    delays = [2 * seconds * (number + chance.random()) / NUM_KILLS for number in range(NUM_KILLS)]
    chance.shuffle(delays)
    outcomes: Counter[str] = Counter()
    for number, delay in enumerate(delays):
        victim = (None, 0, 1)[number % 3]
        job = Job(folder, ("1d", "dim1")[number // 3 % 2], version)
        # The save after a kill, the last one or the measurement's, succeeds and is complete.
        job.wait_for("done", version)
        check_complete(folder, version)
        job.go_on()
        time.sleep(delay)
        job.kill(victim)
        if victim is not None:
            assert f"rank {victim}" in job.errors()[1 - victim], (number, job.lines)
        outcomes[age_of_what_loads(folder, job.last("done"), job.last("begin"))] += 1
        version = job.last("begin") + 1
    print(f"a save takes {seconds:.3f} s; after a kill: {dict(outcomes)}")
    assert outcomes["old"] and outcomes["new"]
