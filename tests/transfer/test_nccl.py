"""What is asked of NCCL and what becomes of its answers, with a fake of it; tests/test_gpu_transfer.py has the real."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fsdp_export.errors import SinkError, UsageError
from fsdp_export.transfer import nccl
from fsdp_export.transfer.nccl import Communicator, load_library, new_unique_id

IN_PROGRESS, INTERNAL_ERROR = 7, 3
CPU = torch.device("cpu")


class FakeNccl:
    """Is busy for some polls after each call, or for ever, or fails.

    Args:
        busy: How many times it answers that a call is in progress.
        failing: The call that fails at once.
        failing_later: Whether what is in progress fails in the end.
    """

    def __init__(self, *, busy: int = 3, failing: str = "", failing_later: bool = False) -> None:
        self.busy, self.failing, self.failing_later = busy, failing, failing_later
        self.left = 0
        self.calls: list[tuple[Any, ...]] = []

    def _called(self, *call: Any) -> int:
        self.calls.append(call)
        self.left = self.busy
        return INTERNAL_ERROR if call[0] == self.failing else IN_PROGRESS

    def ncclGetUniqueId(self, out: Any) -> int:  # noqa: N802
        ctypes.memmove(out, bytes(range(128)), 128)
        return INTERNAL_ERROR if self.failing == "id" else 0

    def ncclCommInitRankConfig(self, comm: Any, num_ranks: int, unique_id: Any, rank: int, config: Any) -> int:  # noqa: N802
        comm._obj.value = 0xBEEF
        fields = config._obj
        return self._called("init", num_ranks, bytes(unique_id), rank, fields.size, fields.magic, fields.blocking)

    def ncclAllReduce(self, *arguments: Any) -> int:  # noqa: N802
        self.number = ctypes.c_float.from_address(arguments[0]).value
        return self._called("all-reduce", *arguments[2:5], arguments[5].value, arguments[6])

    def ncclBroadcast(self, send: int, receive: int, *arguments: Any) -> int:  # noqa: N802
        assert send == receive
        return self._called("broadcast", send, *arguments[:3], arguments[3].value, arguments[4])

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:  # noqa: N802
        assert comm.value == 0xBEEF
        self.left -= 1
        state._obj.value = IN_PROGRESS if self.left >= 0 else INTERNAL_ERROR if self.failing_later else 0
        return 0

    def ncclCommAbort(self, comm: Any) -> int:  # noqa: N802
        self.calls.append(("abort", comm.value))
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:  # noqa: N802
        return f"error {result}".encode()

    def ncclGetLastError(self, comm: Any) -> bytes:  # noqa: N802
        return b"no luck on rank 3\n"


class Device:
    """Stands in for a GPU, which is done with what was queued when somebody says so."""

    is_done = True


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(nccl, "_on", lambda _: nullcontext())
    monkeypatch.setattr(nccl, "_stream", lambda _: 77)
    monkeypatch.setattr(nccl, "_recorded", lambda _: lambda: fake.is_done)
    return fake


def communicator(library: FakeNccl, **options: Any) -> Communicator:
    chosen: dict[str, Any] = {"timeout": 60, "library": library} | options
    return Communicator(bytes(range(128)), 0, 3, CPU, **chosen)


def test_a_communicator_is_made_without_waiting_in_the_library_and_sends_bytes():
    library = FakeNccl()
    unique_id = new_unique_id(library)
    made = communicator(library)
    made.warm_up()
    buffer = torch.arange(100, dtype=torch.uint8)
    made.broadcast(buffer)
    made.broadcast(buffer[:0])
    made.abort()
    made.abort()
    assert library.calls == [
        ("init", 3, unique_id, 0, 24, 0xCAFEBEEF, 0),
        ("all-reduce", 1, 7, 0, 0xBEEF, 77),
        ("broadcast", buffer.data_ptr(), 100, 1, 0, 0xBEEF, 77),
        ("abort", 0xBEEF),
    ]
    assert library.number == 0


@pytest.mark.parametrize("failing", ["init", "broadcast", "later"])
def test_an_error_of_nccl_is_told_with_its_words_and_ends_the_communicator(failing):
    library = FakeNccl(failing=failing)

    def use() -> None:
        made = communicator(library)
        library.failing_later = failing == "later"
        made.broadcast(torch.zeros(4, dtype=torch.uint8))

    with pytest.raises(SinkError, match=r"NCCL failed to .*: found error 3 \(no luck on rank 3\)\. NCCL_DEBUG"):
        use()
    assert library.calls[-1] == ("abort", 0xBEEF)


def test_an_id_that_cannot_be_made():
    with pytest.raises(SinkError, match="NCCL failed to make a unique id"):
        new_unique_id(FakeNccl(failing="id"))


@pytest.mark.parametrize("where", ["library", "device"])
def test_whoever_does_not_come_is_given_up(where, device):
    library = FakeNccl()
    made = communicator(library, timeout=0.2)
    library.busy, device.is_done = (10**9, True) if where == "library" else (3, False)
    with pytest.raises(SinkError, match=r"NCCL took more than 0\.2 s to send 4 bytes"):
        made.broadcast(torch.zeros(4, dtype=torch.uint8))
    assert library.calls[-1] == ("abort", 0xBEEF)
    with pytest.raises(SinkError, match="aborted"):
        made.broadcast(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("doing", ["meet", "send"])
def test_what_makes_waiting_useless_is_raised_at_once(doing, device):
    def check() -> None:
        raise SinkError("the engine said no")

    library = FakeNccl(busy=10**9 if doing == "meet" else 0)
    device.is_done = False
    with pytest.raises(SinkError, match="the engine said no"):
        communicator(library, check=check).broadcast(torch.zeros(4, dtype=torch.uint8), check=check)
    assert library.calls[-1] == ("abort", 0xBEEF)


def test_an_abort_that_does_not_return_is_not_waited_for(monkeypatch, caplog):
    library = FakeNccl()
    library.ncclCommAbort = lambda _: threading.Event().wait()
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 0.05)
    communicator(library).abort()
    assert "did not leave a communicator" in caplog.text


def test_a_bucket_of_another_device_is_refused():
    with pytest.raises(SinkError, match="expected cpu, found meta"):
        communicator(FakeNccl()).broadcast(torch.zeros(4, dtype=torch.uint8, device="meta"))


def test_what_is_no_id_is_refused():
    with pytest.raises(UsageError, match="expected 128 bytes, found 3"):
        Communicator(b"abc", 0, 2, CPU, timeout=1, library=FakeNccl())


def test_the_library_is_looked_for_where_torch_has_it(tmp_path, monkeypatch):
    load_library.cache_clear()
    monkeypatch.setattr(nccl, "_candidates", lambda: iter([tmp_path / "libnccl.so.2"]))
    (tmp_path / "libnccl.so.2").write_bytes(b"no library")
    monkeypatch.setattr(nccl, "_LIBRARY", "libnone-of-this-name.so")
    with pytest.raises(UsageError, match="needs NCCL"):
        load_library()
    monkeypatch.setattr(nccl, "_LIBRARY", "libc.so.6")
    with pytest.raises(UsageError, match=r"has no ncclGetUniqueId: expected NCCL 2\.14"):
        load_library()
