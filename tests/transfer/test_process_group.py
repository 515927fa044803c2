"""A group of processes that found each other by its store: what arrives, and how every wait ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from torch.distributed import distributed_c10d

from fsdp_export.errors import SinkError, UsageError
from fsdp_export.transfer.process_group import SenderGroup
from fsdp_export.transfer.servers import address_towards

LARGE = 1 << 26
"""Bytes that no socket takes before somebody reads them."""


def receive(pipe: Connection, port: int, rank: int, num_ranks: int, name: str) -> None:
    """Join with what torch makes its own groups with, receive buffers of the sizes that are asked for, and send them.

    Joins when it is told to.
    """
    private: Any = distributed_c10d
    torch.set_num_threads(1)
    while (size := pipe.recv()) is not None:
        if size == "join":
            store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, num_ranks))
            timeout, backend = timedelta(seconds=60), dist.Backend("gloo")
            store = dist.PrefixStore(name, store)
            group, _ = private._new_process_group_helper(
                num_ranks, rank, [], backend, store, group_name=name, timeout=timeout
            )
            private._world.pg_group_ranks[group] = {each: each for each in range(num_ranks)}
            continue
        buffer = torch.empty(size, dtype=torch.uint8)
        try:
            dist.broadcast(buffer, 0, group=group)
            pipe.send((int(buffer.sum()), buffer[:9].tolist()))
        except RuntimeError:
            pipe.send("failed")
    os._exit(0)


@contextmanager
def receivers(group: SenderGroup) -> Iterator[list[tuple[Any, Connection]]]:
    context = get_context("fork")
    started = []
    for rank in range(1, group.num_ranks):
        mine, theirs = context.Pipe()
        arguments = (theirs, group.port, rank, group.num_ranks, group.name)
        process = context.Process(target=receive, args=arguments)
        process.start()
        started.append((process, mine))
    try:
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def alone(check: Callable[[], None]) -> None:
    """Run in another process: the threads of gloo and of a store cannot be forked."""
    run_ranks(check, 1)


def new(num_ranks: int = 2, **options: Any) -> SenderGroup:
    return SenderGroup(num_ranks, **{"backend": "gloo", "name": "a group", "timeout": 60, **options})


def test_what_is_sent_arrives_and_other_groups_are_left_alone():
    def check() -> None:
        groups = [new(3), new(3, name="another")]
        for group in groups:
            with receivers(group) as others:
                for _, pipe in others:
                    pipe.send("join")
                group.join()
                for size in (9, 0, LARGE):
                    sent = torch.arange(size).to(torch.uint8)
                    for _, pipe in others:
                        pipe.send(size)
                    group.broadcast(sent)
                    for _, pipe in others:
                        assert pipe.recv() == (int(sent.sum()), list(range(min(size, 9))))
                group.abort()
        assert dist.get_world_size() == 1  # torch knows nothing of them
        dist.barrier()

    alone(check)


@pytest.mark.parametrize("is_early", [True, False])
def test_others_that_do_not_come_are_waited_for_in_vain(is_early):
    def check() -> None:
        group = new(timeout=3600 if is_early else 0.5)
        begin = time.monotonic()

        def gone() -> None:
            if is_early and time.monotonic() - begin > 0.2:
                raise SinkError("the server is gone")

        message = "the server is gone" if is_early else "failed to meet 1 other ranks"
        with pytest.raises(SinkError, match=message):
            group.join(gone)
        with pytest.raises(SinkError, match="failed to send 4 bytes: the process group was left"):
            group.broadcast(torch.zeros(1))

    alone(check)


@pytest.mark.parametrize("fault", ["stall", "kill", "check", "abort"])
def test_a_transfer_that_never_ends_does_not_keep_this_side(fault):
    def check() -> None:
        group = new()
        with receivers(group) as ((process, pipe),):
            pipe.send("join")
            group.join()
            group._timeout = 0.5 if fault == "stall" else 3600
            begin = time.monotonic()

            def lose_patience() -> None:
                if time.monotonic() - begin < 0.2:
                    return
                if fault == "kill":
                    os.kill(process.pid, signal.SIGKILL)
                elif fault == "check":
                    raise SinkError("another rank failed")
                elif fault == "abort":
                    group.abort()

            message = {
                "stall": "failed to send 67,108,864 bytes within 0.5 s",
                "kill": "failed to send 67,108,864 bytes: found .*Connection",
                "check": "another rank failed",
                "abort": "the process group was left",
            }[fault]
            with pytest.raises(SinkError, match=message):
                group.broadcast(torch.zeros(LARGE, dtype=torch.uint8), lose_patience)
            # Another one works at once.
            again = new(name="again")
            with receivers(again) as ((_, other),):
                other.send("join")
                again.join()
                other.send(9)
                again.broadcast(torch.ones(9, dtype=torch.uint8))
                assert other.recv() == (9, [1] * 9)
                again.abort()

    alone(check)


def test_the_port_can_be_chosen_and_one_that_is_taken_is_named():
    def check() -> None:
        port = free_port()
        group = new(port=port)
        assert group.port == port
        with pytest.raises(SinkError, match=rf"cannot listen on port {port}: found .*Name another one"):
            new(port=port)

    alone(check)


def test_the_backend_must_be_there():
    def check() -> None:
        with pytest.raises(UsageError, match="expected nccl or gloo, found mpi"):
            new(backend="mpi")
        group = new(backend="nccl")
        group.require(torch.device("cuda"))
        with pytest.raises(UsageError, match="NCCL sends from a GPU"):
            group.require(torch.device("cpu"))
        if not dist.is_nccl_available():
            with pytest.raises(SinkError, match="built without NCCL"):
                group.join()

    alone(check)


def test_the_address_is_one_of_this_host():
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    if socket.has_ipv6:
        assert address_towards("https://[::1]") == "::1"
    with pytest.raises(SinkError, match=r"no way to http://no\.such\.host\.invalid"):
        address_towards("http://no.such.host.invalid:1")
