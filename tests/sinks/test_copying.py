"""Bytes from file to file: with the kernel's help or without, and what goes wrong on either side."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdp_export.errors import SourceError
from fsdp_export.sinks.copying import copy_bytes
from fsdp_export.steps import Extent

DATA = random.Random(0).randbytes(1_000_003)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(DATA)
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def extent(source: Path, offset: int, num_bytes: int) -> Extent:
    @contextmanager
    def opened() -> Iterator[int]:
        descriptor = os.open(source, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    return Extent(source, offset, num_bytes, opened)


def failing(number: int, *, after: int = 0) -> Callable[..., int]:
    real, calls = os.copy_file_range, []

    def copy_file_range(*args: Any) -> int:
        calls.append(args)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        source, target, count, *offsets = args
        return real(source, target, min(count, 1000), *offsets)

    return copy_file_range


KERNELS: dict[str, Callable[..., int] | None] = {
    "that copies": None,
    "that cannot between these file systems": failing(errno.EXDEV),
    "too old": failing(errno.ENOSYS),
    "that stops halfway": failing(errno.EINVAL, after=2),
    "that copies nothing": lambda *_: 0,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("offset", "num_bytes", "at"), [(0, len(DATA), 0), (17, 70_001, 12_345), (5, 0, 3)])
def test_bytes_arrive_where_they_belong(kernel, offset, num_bytes, at, source, target, monkeypatch):
    if KERNELS[kernel] is not None:
        monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    copy_bytes(extent(source, offset, num_bytes), target, at)
    assert os.pread(target, len(DATA) + at + 1, 0) == (
        bytes(at) + DATA[offset : offset + num_bytes] if num_bytes else b""
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_source_that_is_shorter_is_refused(kernel, source, target, monkeypatch):
    if KERNELS[kernel] is not None:
        monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    with pytest.raises(SourceError) as caught:
        copy_bytes(extent(source, len(DATA) - 10, 30), target, 0)
    assert str(caught.value) == (
        f"a truncated data file in {source}: expected 1,000,023 bytes, found 1,000,003. Copy the file here again, or "
        "use another step."
    )


def test_a_source_that_cannot_be_opened_or_read_is_named(source, target, monkeypatch):
    with pytest.raises(SourceError, match=r"^a data file that cannot be read in .*nowhere: found No such file or"):
        copy_bytes(extent(source.with_name("nowhere"), 0, 1), target, 0)
    with pytest.raises(SourceError, match=r"^a data file that cannot be read in .*: found Is a directory"):
        copy_bytes(extent(source.parent, 0, 1), target, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_not_tried_again(number, source, target, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", failing(number))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written all the same"))
    with pytest.raises(OSError, match=os.strerror(number)):
        copy_bytes(extent(source, 0, 10), target, 0)


def test_a_target_that_cannot_be_written_raises_the_systems_error(source, tmp_path):
    descriptor = os.open(source, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        copy_bytes(extent(source, 0, 10), descriptor, 0)
    os.close(descriptor)
