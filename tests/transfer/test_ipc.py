"""The two ends of checkpoint-engine's wire: workers of both kinds, and some that do not play by its rules."""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from fsdp_export.errors import SinkError
from fsdp_export.transfer.ipc import WorkerLink

BUCKET = [{"name": "a", "dtype": None, "shape": (2,), "offset": 256}]


class Evil:
    """What a hostile worker would have us unpickle."""

    def __reduce__(self) -> Any:
        return os.abort, ()


class Talk:
    """A worker on a thread, which sends answers in turn to what it receives.

    Attributes:
        heard: What it received so far, unpickled.
    """

    def __init__(self, address: str, answers: list[bytes | None]) -> None:
        self.heard: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(address, answers))
        self._thread.start()

    def _run(self, address: str, answers: list[bytes | None]) -> None:
        context: Any = zmq.Context.instance()
        with context.socket(zmq.REP) as socket:
            socket.connect(address)
            for answer in answers:
                if not socket.poll(60_000):
                    return
                self.heard.append(pickle.loads(socket.recv()))
                if answer is None:
                    return
                socket.send(answer)

    def join(self) -> list[Any]:
        self._thread.join()
        return self.heard


@contextmanager
def link(timeout: float = 60.0, watch: Callable[[], bool] = lambda: False) -> Iterator[tuple[WorkerLink, str]]:
    address = f"ipc://@fsdp-export-test-{secrets.token_hex(8)}"
    ours = WorkerLink(address, worker="the worker", timeout=timeout, watch=watch)
    try:
        yield ours, address
    finally:
        ours.abort("the test is over")


@pytest.mark.parametrize("answers", [[b""] * 4, [b""] * 3], ids=["two endings", "one ending"])
def test_both_kinds_of_workers_end_well(answers):
    with link() as (ours, address):
        worker = Talk(address, answers)
        ours.meet("")
        for message in ((print, (1,)), BUCKET, None):
            ours.ask(message, "it")
        ours.finish()
        assert worker.join() == [(print, (1,)), BUCKET, *[None] * (len(answers) - 2)]


def test_what_a_worker_answers_is_text_and_nothing_else():
    with link() as (ours, address):
        Talk(address, [pickle.dumps(Evil())])
        ours.meet("")
        with pytest.raises(SinkError, match=r"the worker failed to take a bucket: found .*abort"):
            ours.ask(BUCKET, "a bucket")


def test_a_worker_that_hangs_up_brings_the_engine_s_reason_if_there_is_one():
    def watch() -> bool:
        raise SinkError("the engine ran out of luck")

    with link() as (ours, address):
        Talk(address, [None])
        ours.meet("")
        with pytest.raises(SinkError, match=r"the worker hung up before it had taken a bucket\. Look at the log"):
            ours.ask(BUCKET, "a bucket")
    with link(watch=watch) as (ours, address), pytest.raises(SinkError, match="the engine ran out of luck"):
        ours.meet("")


def test_a_worker_that_does_not_come_or_answer():
    with link(0.2) as (ours, address):
        with pytest.raises(SinkError, match=r"the worker did not connect within 0.2 s. Look there\.$"):
            ours.meet("Look there")
        ours._timeout = 60.0
        Talk(address, [b""])
        ours.meet("")
        ours.ask(BUCKET, "a bucket")
    with (
        link(0.2, watch=lambda: True) as (ours, _),
        pytest.raises(SinkError, match="says that it is done, but the wor"),
    ):
        ours.meet("Look there")


def test_waiting_can_be_stopped_by_another_thread():
    with link(60) as (ours, _):
        threading.Timer(0.1, ours.stop).start()
        with pytest.raises(SinkError, match="the worker is not waited for any more"):
            ours.meet("")


@pytest.mark.parametrize("moment", ["before it connects", "when it is idle", "while it works"])
def test_an_update_that_is_off_is_told_to_the_worker(moment):
    with link() as (ours, address):
        if moment == "before it connects":
            ours.abort("out of luck")
            time.sleep(0.2)
            worker = Talk(address, [b""])
        else:
            worker = Talk(address, [b"", b""])
            ours.meet("")
            if moment == "when it is idle":
                ours.ask(BUCKET, "a bucket")
            else:
                ours._send(BUCKET)
            ours.abort("out of luck")
        assert repr(worker.join()[-1]) == "RuntimeError('out of luck')"


def test_an_address_that_is_taken():
    with link() as (_, address), pytest.raises(SinkError, match=r"cannot be bound \(Address already in use\)"):
        WorkerLink(address, worker="the worker", timeout=1, watch=lambda: False)
