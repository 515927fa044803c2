"""Runs a function on several ranks: forked processes that share a gloo process group."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch._dynamo  # noqa: F401  what `fully_shard` imports at its first use, here once for all ranks
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["RankFailedError", "StoreKind", "free_port", "run_ranks"]

StoreKind = Literal["tcp", "file"]

# After the first failure: what the others still have to say is worth less than a quick answer.
_GRACE_SECONDS = 3.0
_STACKS_SECONDS = 10.0
# The private name warns since torch 2.14.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
# To meet, whatever a test allows afterwards.
_MEETING_TIMEOUT = timedelta(seconds=60)
# Below those that the system gives to whoever asks for any, as most tests do, or connects.
_PORTS = range(12_000, 32_000)


class RankFailedError(AssertionError):
    """A rank raised, died, or did not come back."""


class _Running(NamedTuple):
    """A rank, and the pipe that its result comes through."""

    process: ForkProcess
    receiver: Connection


class _Outcome(NamedTuple):
    """What a rank returned, or what went wrong there and when."""

    result: Any
    failure: str = ""
    time: float = 0.0


class _Rendezvous(NamedTuple):
    """Where the ranks find each other: a folder for a file store, a socket that rank 0 listens on for a TCP store."""

    kind: StoreKind
    folder: Path
    listener: socket.socket
    world_size: int

    def store(self, rank: int) -> dist.Store:
        if self.kind == "file":
            self.listener.close()
            return dist.FileStore(str(self.folder / "store"), self.world_size)
        host, port = self.listener.getsockname()
        if rank:
            # Left open, it would seem to listen on when rank 0 is dead.
            self.listener.close()
            return dist.TCPStore(host, port, self.world_size, is_master=False)
        return dist.TCPStore(
            host,
            port,
            self.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self.listener.detach(),
        )


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    pg_timeout: float = 30.0,
    store: StoreKind = "file",
    expect_death: Collection[int] = (),
) -> list[Any]:
    """Call `fn(*args)` on every rank.

    Args:
        fn: Any function; the ranks are forked, so that nothing is pickled but what it returns.
        world_size: Number of ranks.
        args: The same for every rank.
        timeout: Seconds until all ranks are killed.
        pg_timeout: Seconds until a collective fails, once the ranks have met.
        store: What the ranks find each other by: a file, or a TCP store that rank 0 hosts, which is slow to come up
            where the name server is (torch looks up the name of every peer).
        expect_death: Ranks that may die; the result of a dead one is None.

    Returns:
        What the ranks returned, in their order.

    Raises:
        RankFailedError: With the traceback of the rank that failed first, or the ranks that did not finish.
    """
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0), backlog=128) as listener,
        warnings.catch_warnings(),
    ):
        # Python 3.12 warns of a fork beside other threads; torch's idle ones do no harm.
        warnings.simplefilter("ignore", DeprecationWarning)
        rendezvous = _Rendezvous(store, Path(folder), listener, world_size)
        running: dict[int, _Running] = {}
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_be_rank, args=(rank, rendezvous, pg_timeout, sender, fn, args))
                process.start()
                sender.close()
                running[rank] = _Running(process, receiver)
            listener.close()
            results = _collect(running, timeout, expect_death)
            for process, _ in running.values():
                process.join(timeout)
        finally:
            for process, receiver in running.values():
                process.kill()
                process.join()
                receiver.close()
        return results


def free_port() -> int:
    """Return a port on which nobody listens, nor will until it is asked for by its number."""
    while True:
        port = secrets.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _be_rank(
    rank: int,
    rendezvous: _Rendezvous,
    pg_timeout: float,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Tells where it is, and ends.
    faulthandler.register(signal.SIGUSR1, file=2, chain=True)
    torch.set_num_threads(1)
    # What the parent left for its collector (threads, sockets, process groups) is not for a fork to end.
    gc.freeze()
    try:
        dist.init_process_group(
            "gloo",
            store=rendezvous.store(rank),
            rank=rank,
            world_size=rendezvous.world_size,
            timeout=_MEETING_TIMEOUT,
        )
        # Or a rank that is done soon is gone before another one has connected to it.
        dist.barrier()
        _set_timeout(timedelta(seconds=pg_timeout))
        sender.send(_Outcome(fn(*args)))
    except BaseException:  # noqa: BLE001  whatever it is, it is the parent's to raise
        sender.send(_Outcome(None, traceback.format_exc(), time.monotonic()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _collect(running: dict[int, _Running], timeout: float, expect_death: Collection[int]) -> list[Any]:
    """Wait for what every rank sends."""
    outcomes: dict[int, _Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(running) and (seconds := deadline - time.monotonic()) > 0:
        # A dead rank's end of the pipe is closed, which also makes it ready.
        ready = wait([each.receiver for rank, each in running.items() if rank not in outcomes], seconds)
        for rank in [rank for rank, each in running.items() if each.receiver in ready]:
            outcomes[rank] = _receive(rank, running[rank], may_die=rank in expect_death)
            if outcomes[rank].failure:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    failures = [outcome for outcome in outcomes.values() if outcome.failure]
    if failures:
        raise RankFailedError(min(failures, key=lambda outcome: outcome.time).failure)
    unfinished = [rank for rank in running if rank not in outcomes]
    if unfinished:
        for rank in unfinished:
            pid = running[rank].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        for rank in unfinished:
            running[rank].process.join(_STACKS_SECONDS)
        raise RankFailedError(f"ranks {unfinished} did not finish within {timeout:g} s; their stacks are on stderr")
    return [outcomes[rank].result for rank in sorted(outcomes)]


def _receive(rank: int, running: _Running, *, may_die: bool) -> _Outcome:
    """Receive the outcome of a rank that sent one or ended."""
    try:
        outcome: _Outcome = running.receiver.recv()
    except EOFError:
        running.process.join()
        if may_die:
            return _Outcome(None)
        return _Outcome(None, f"rank {rank} died with exit code {running.process.exitcode}", time.monotonic())
    return outcome._replace(failure=f"rank {rank} raised\n{outcome.failure}") if outcome.failure else outcome
