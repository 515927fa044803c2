"""Syncs happen early, once per file at a time, and none is lost."""

import errno
import os
import threading

import pytest

from fsdp_export.sinks import writeback
from fsdp_export.sinks.writeback import Writeback


@pytest.fixture
def syncs(monkeypatch):
    """Record syncs as (kind, file); `fail` makes the next early one fail."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(writeback, "_BYTES_BETWEEN", 100)
    monkeypatch.setattr(os, "fdatasync", lambda file: calls.append(("early", file)))
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(("last", file)))
    return calls


def test_early_and_last(syncs):
    files = Writeback(is_on=True)
    for _ in range(5):
        files.wrote(7, 60)
    files.finish(7)
    files.wrote(8, 10)
    files.finish(8)
    files.close()
    assert syncs[-2:] == [("last", 7), ("last", 8)]
    assert 1 <= syncs.count(("early", 7)) <= 2
    assert ("early", 8) not in syncs


def test_off(syncs):
    files = Writeback(is_on=False)
    files.wrote(7, 1000)
    files.finish(7)
    files.close()
    assert not syncs


def test_writers_do_not_wait_for_a_slow_disk(monkeypatch, syncs):
    is_slow = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: is_slow.wait(30))
    files = Writeback(is_on=True)
    for _ in range(50):
        files.wrote(7, 100)
    assert not syncs
    is_slow.set()
    files.finish(7)
    files.close()
    assert syncs == [("last", 7)]


def test_an_early_failure_is_raised_in_the_end(monkeypatch, syncs):
    def fail(file: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fdatasync", fail)
    files = Writeback(is_on=True)
    files.wrote(7, 100)
    with pytest.raises(OSError, match="broken disk"):
        files.finish(7)
    files.close()
    assert not syncs
