"""Makes inputs by number, checks them in processes that are limited, and tells which ones went wrong."""

from __future__ import annotations

import collections
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random

import torch
from fuzz import archives, damage, misplace, pickles, texts
from fuzz.case import Case
from fuzz.check import Way, check, export, export_into, read
from fuzz.limits import MAX_SECONDS, ExceededError, limit_process
from fuzz.seeds import Seed, make_seeds

__all__ = ["Failure", "Outcome", "check_one", "fuzz", "isolated"]

_MUTATORS = [*damage.MUTATORS, *misplace.MUTATORS, *pickles.MUTATORS * 2, *texts.MUTATORS * 2, *archives.MUTATORS]
_WAYS = (*[read] * 8, export, export_into)


@dataclass(frozen=True)
class Failure:
    """An input that gave neither a right result nor one of our errors.

    Attributes:
        number: Its number.
        what: What it was, and what came of it.
    """

    number: int
    what: str


@dataclass
class Outcome:
    """What came of all inputs.

    Attributes:
        counts: How often each verdict was given.
        failures: What went wrong.
        seconds: How long it took.
    """

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0


def fuzz(numbers: Iterable[int], seed: int, *, processes: int = 2, max_failures: int = 20) -> Outcome:
    """Check inputs.

    Args:
        numbers: Their numbers; each stands for the same input always.
        seed: Another one makes other inputs of the same numbers.
        processes: How many processes check at once.
        max_failures: After so many nothing more is checked.
    """
    started, outcome = time.perf_counter(), Outcome()
    with tempfile.TemporaryDirectory(prefix="fsdp-export-fuzz-") as root:
        os.chmod(root, 0o755)  # noqa: PTH101 - some inputs are read by a user who owns nothing
        seeds = _prepare(Path(root) / "seeds")
        numbers = list(numbers)
        workers = [
            _Worker(seeds, seed, numbers[index::processes], Path(root) / f"worker-{index}")
            for index in range(processes)
        ]
        try:
            while any(worker.numbers for worker in workers) and len(outcome.failures) < max_failures:
                _collect(workers, outcome)
        finally:
            for worker in workers:
                worker.end()
    outcome.seconds = time.perf_counter() - started
    return outcome


def check_one(number: int, seed: int, folder: Path) -> str:
    """Make one input and check it in this process; its files stay.

    Args:
        number: Its number.
        seed: As for `fuzz`.
        folder: Where its files go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    case, way = _make(_prepare(folder / "seeds"), seed, number, folder)
    print(_describe(case, way), flush=True)
    return check(case, way)


def isolated(function: Callable[[Path], str], folder: Path) -> str:
    """Call a function in a process of its own that is limited as those of the fuzzer.

    Args:
        function: What to call.
        folder: Its argument.

    Returns:
        What it returns, or what went wrong in it.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_call, args=(theirs, function, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        result: str = ours.recv() if ours.poll(2 * MAX_SECONDS) else "it hangs"
    except EOFError:
        process.join()
        result = f"the process ended with {process.exitcode}"
    process.kill()
    process.join()
    return result


def _call(connection: Connection, function: Callable[[Path], str], folder: Path) -> None:
    limit_process()
    try:
        connection.send(function(folder))
    except (Exception, ExceededError):  # noqa: BLE001 - whatever went wrong is the result
        connection.send(traceback.format_exc(limit=-8))
    os._exit(0)


def _prepare(folder: Path) -> list[Seed]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    return make_seeds(folder)


def _describe(case: Case, way: Way) -> str:
    return "\n    ".join([f"{way.__name__} {case.seed.name}", *case.notes])


def _make(seeds: Sequence[Seed], seed: int, number: int, folder: Path) -> tuple[Case, Way]:
    draw = Random(f"{seed} {number}")
    case = Case(draw, draw.choice(seeds), seeds, folder / "case")
    case.folder.mkdir()
    case.write_seed()
    way = draw.choice(_WAYS)
    case.mutate(_MUTATORS)
    return case, export if way is export_into and not case.seed.is_written else way


class _Worker:
    """A process that checks inputs one after the other, and is replaced when it dies or hangs."""

    def __init__(self, seeds: Sequence[Seed], seed: int, numbers: Sequence[int], folder: Path) -> None:
        self.numbers = collections.deque(numbers)
        self._seeds, self._seed, self._folder = seeds, seed, folder
        self._start()

    def _start(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.heard_at = time.monotonic()
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(theirs, self._seeds, self._seed, list(self.numbers), self._folder), daemon=True
        )
        self._process.start()
        theirs.close()

    def receive(self) -> tuple[int, str, str]:
        """Return what came of the next input: its number, a verdict, and what went wrong if that is empty."""
        number = self.numbers.popleft()
        self.heard_at = time.monotonic()
        with suppress(EOFError):
            verdict, what = self.connection.recv()
            return number, verdict, what
        self._process.join()
        ended = f"the process ended with {self._process.exitcode}"
        self._start()
        return number, "", ended

    def restart_if_stuck(self) -> None:
        if self.numbers and time.monotonic() - self.heard_at > 2 * MAX_SECONDS and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _collect(workers: Sequence[_Worker], outcome: Outcome) -> None:
    """Wait for what the workers say next."""
    ready = wait([worker.connection for worker in workers if worker.numbers], 1.0)
    for worker in workers:
        if worker.connection in ready:
            number, verdict, what = worker.receive()
            if verdict:
                outcome.counts[verdict] += 1
            else:
                outcome.failures.append(Failure(number, what))
        else:
            worker.restart_if_stuck()


def _work(connection: Connection, seeds: Sequence[Seed], seed: int, numbers: Sequence[int], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)
    os.chdir(folder)
    limit_process()
    for number in numbers:
        case, way = _make(seeds, seed, number, folder)
        try:
            connection.send((check(case, way), ""))
        except (Exception, ExceededError):  # noqa: BLE001 - see _call
            connection.send(("", f"{_describe(case, way)}\n{traceback.format_exc(limit=-8)}"))
        case.remove()
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "linked").unlink(missing_ok=True)
    os._exit(0)
