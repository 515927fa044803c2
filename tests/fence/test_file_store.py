"""A rank that is killed as it writes to a file store leaves one that the others can read."""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_export.compat import connect
from fsdp_export.errors import RankError
from fsdp_export.fence import file_store
from fsdp_export.fence.board import Board
from fsdp_export.fence.file_store import log_of

FORK = multiprocessing.get_context("fork")


def board_of(file: Path) -> Board:
    return Board(connect(dist.PrefixStore("job", dist.FileStore(str(file), 2)), "fsdp_export"))


def test_a_writer_killed_at_any_moment_leaves_what_it_wrote(tmp_path: Path) -> None:
    def write(file: Path, progress: threading.Event) -> None:
        board = board_of(file)
        for number in itertools.count(1):
            board.write("beat", number)
            progress.set()

    def read(board: Board) -> None:
        assert (board.read("beat") or 0) > 0

    # Of torch's own writes every third kill is one too many.
    for number in range(30):
        file, progress = tmp_path / str(number), FORK.Event()
        board = board_of(file)
        writer = FORK.Process(target=write, args=(file, progress))
        writer.start()
        assert progress.wait(30)
        writer.kill()
        writer.join()
        reader = FORK.Process(target=read, args=(board,))
        reader.start()
        reader.join(30)
        code = reader.exitcode
        reader.kill()
        reader.join()
        assert code == 0, f"kill {number}"


def test_torch_and_a_board_write_to_one_file(tmp_path: Path) -> None:
    file = tmp_path / "store"

    def write_with_torch() -> None:
        store = dist.FileStore(str(file), 2)
        for number in range(300):
            store.set(f"torch/{number}", str(number))

    other = FORK.Process(target=write_with_torch)
    other.start()
    board = board_of(file)
    for number in range(300):
        board.write(f"ours/{number}", [number, "ä" * number])
    other.join(30)
    assert other.exitcode == 0
    store = dist.FileStore(str(file), 2)
    assert [store.get(f"torch/{number}") for number in range(300)] == [str(n).encode() for n in range(300)]
    again = board_of(file)
    assert [again.read(f"ours/{number}") for number in range(300)] == [[n, "ä" * n] for n in range(300)]


@pytest.mark.parametrize("rest", [1, 4, 10, -5, -3, -1])
def test_what_a_killed_rank_left_half_written_is_cut_off(tmp_path: Path, rest: int) -> None:
    file = tmp_path / "store"
    board, other = board_of(file), board_of(file)
    board.write("first", "kept")
    size = file.stat().st_size
    other.write("second", 1)
    os.truncate(file, rest + (size if rest > 0 else file.stat().st_size))
    assert (board.read("first"), board.read("second")) == ("kept", None)
    assert file.stat().st_size == size
    board.write("second", 2)
    assert board_of(file).read("second") == 2


def test_a_reader_that_hangs_in_the_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_LOCKED_SECONDS", 0.3)
    file = tmp_path / "store"
    board = board_of(file)
    board.write("key", 1)
    with file.open("ab") as log:
        log.write(b"\x01\0")
    with file.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(RankError, match=f"a rank was killed as it wrote to the store .*{file}.* locked for 0.3 s"):
            board.read("key")
    assert board.read("key") == 1


def test_a_file_that_is_written_in_another_way_is_left_alone(tmp_path: Path) -> None:
    class Elsewhere:
        """A store of the same kind that keeps its keys in another way."""

        path = str(tmp_path / "keys")

    Path(Elsewhere.path).write_bytes(b"\xff" * 7)
    assert log_of(Elsewhere()) is None  # type: ignore[arg-type]
    assert Path(Elsewhere.path).read_bytes() == b"\xff" * 7


def test_a_file_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "store"
    board = board_of(file)
    board.write("key", "x" * 1000)
    file.unlink()
    assert board.read("other") is None
    again = board_of(file)
    again.write("other", 1)
    content = file.read_bytes()
    board.read("key")
    assert file.read_bytes() == content


def test_other_stores_have_no_file() -> None:
    assert log_of(dist.HashStore()) is None
    assert log_of(dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, 1, is_master=True))) is None
