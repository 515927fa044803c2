import errno
import os
from pathlib import Path

import pytest
from fuzz.limits import unprivileged

from fsdp_export.paths import is_file, is_folder, read_file


def entry(path: Path) -> os.DirEntry[str]:
    with os.scandir(path.parent) as entries:
        return next(entry for entry in entries if entry.name == path.name)


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path / "loop"


def test_files_folders_and_links_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, target in (("to file", "file"), ("to folder", "folder"), ("to nothing", "nothing")):
        (tmp_path / name).symlink_to(target)
    for look in (lambda path: path, entry):
        names = [path.name for path in sorted(tmp_path.iterdir()) if is_file(look(path))]
        assert names == ["file", "to file"]
        names = [path.name for path in sorted(tmp_path.iterdir()) if is_folder(look(path))]
        assert names == ["folder", "to folder"]


def test_what_cannot_be_looked_at_is_neither(loop: Path, tmp_path: Path) -> None:
    for path in (loop, entry(loop), tmp_path / ("x" * 300), tmp_path / "a\0b", tmp_path / "\ud800"):
        assert not is_file(path)
        assert not is_folder(path)


def test_what_may_not_be_looked_at_is_neither(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "folder").chmod(0)
    try:
        with unprivileged(is_on=True):
            assert not is_file(tmp_path / "folder" / "file")
            assert not is_folder(tmp_path / "folder" / "file")
            with pytest.raises(PermissionError):
                read_file(tmp_path / "folder" / "file")
    finally:
        (tmp_path / "folder").chmod(0o755)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    assert read_file(tmp_path / "file", 4) == b"four"
    with pytest.raises(OSError, match="4 bytes, which is too large") as caught:
        read_file(tmp_path / "file", 3)
    assert caught.value.errno == errno.EFBIG


def test_nothing_but_a_file_is_read(loop: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="Not a regular file"):
            read_file(path)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        read_file(loop)
