"""A folder per version: whatever dies, whenever, the link points to a complete version, and the next run cleans up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from publish_faults import before_each_change, close_locks, dies_at, restore, tree

from fsdp_export.errors import SinkError, UsageError
from fsdp_export.publish import NewVersion
from fsdp_export.publish.versions import LATEST, versions_in

OTHERS = {"notes.txt": b"mine", "other": None, "other/fsdp_export.json": b"{}", "000099.txt": b""}


def write(root: Path, text: str, *, keep: int | None = 2, name: str | None = None, fsync: bool = False) -> str:
    """Write a version of two files that tell which it is."""
    version = NewVersion.begin(root, name, fsync=fsync)
    try:
        version.staging.mkdir()
        for file in ("a", "b"):
            (version.staging / file).write_text(text)
        version.publish()
        version.remove_old(keep)
    except BaseException as error:
        if isinstance(error, Exception):
            version.abort()
        raise
    return version.name


def read(folder: Path) -> str:
    """Return what a complete version says of itself."""
    one, other = (folder / "a").read_text(), (folder / "b").read_text()
    assert one == other
    return one


def names_in(root: Path) -> list[str]:
    return [path.name for path in versions_in(root)]


def test_versions_follow_each_other(tmp_path):
    root = tmp_path / "weights"
    for number in range(1, 5):
        assert write(root, str(number), fsync=True) == f"00000{number}"
        assert read(root / LATEST) == str(number)
        assert (root / LATEST).readlink() == Path(f"00000{number}")
        assert names_in(root) == [f"00000{n}" for n in range(max(number - 1, 1), number + 1)]
    assert sorted(path.name for path in root.iterdir()) == ["000003", "000004", LATEST]


def test_names_of_ones_own_keep_the_order_in_which_they_came(tmp_path):
    for name in ("step-9", "step-10", "step-1", None, "best"):
        write(tmp_path, name or "number", keep=3, name=name)
    assert names_in(tmp_path) == ["step-1", "000004", "best"]
    write(tmp_path, "all", keep=None)
    assert names_in(tmp_path) == ["step-1", "000004", "best", "000006"]
    write(tmp_path, "one", keep=1)
    assert names_in(tmp_path) == ["000007"]


def test_only_versions_are_removed(tmp_path):
    restore(tmp_path, OTHERS)
    (tmp_path / "000005").mkdir()
    for text in ("one", "two", "three"):
        write(tmp_path, text, keep=1)
    assert names_in(tmp_path) == ["000008"]
    assert {name: content for name, content in tree(tmp_path).items() if name in OTHERS} == OTHERS
    assert (tmp_path / "000005").is_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".hidden", LATEST, "a\0b"])
def test_names_that_no_version_can_have(name, tmp_path):
    with pytest.raises(UsageError, match="no name of a version"):
        NewVersion.begin(tmp_path, name, fsync=False)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(tmp_path):
    write(tmp_path, "old", name="one")
    with pytest.raises(SinkError, match=rf"a version that is there already in {tmp_path}/one. Choose another version"):
        write(tmp_path, "new", name="one")
    assert read(tmp_path / "one") == "old"
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    with pytest.raises(SinkError, match=f"latest is no link in {tmp_path}"):
        write(tmp_path, "new")


def test_one_at_a_time(tmp_path):
    first = NewVersion.begin(tmp_path, None, fsync=False)
    with pytest.raises(SinkError, match=f"another process is exporting in {tmp_path}"):
        NewVersion.begin(tmp_path, None, fsync=False)
    first.abort()
    assert not list(tmp_path.iterdir())
    write(tmp_path, "new")


def test_a_process_that_dies_anywhere_leaves_complete_versions_only(tmp_path):
    restore(tmp_path, OTHERS)
    for text in ("one", "two"):
        write(tmp_path, text)
    before = tree(tmp_path)
    seen = set()
    for number in range(1000):
        restore(tmp_path, before)
        (tmp_path / LATEST).rmdir()  # `tree` takes the link for a folder
        (tmp_path / LATEST).symlink_to("000002")
        has_died = dies_at(number, lambda: write(tmp_path, "three", fsync=True), tmp_path)
        current = read(tmp_path / LATEST)
        seen.add((current, len(names_in(tmp_path))))
        assert {read(path) for path in versions_in(tmp_path)} <= {"one", "two", "three"}
        assert current == ("three" if not has_died else current)
        write(tmp_path, "four")
        assert read(tmp_path / LATEST) == "four"
        assert len(names_in(tmp_path)) == 2
        assert not list(tmp_path.glob(".*"))
        assert {name: content for name, content in tree(tmp_path).items() if name in OTHERS} == OTHERS
        if not has_died:
            break
    assert seen == {("two", 2), ("two", 3), ("three", 3), ("three", 2)}
    assert number > 8


def test_a_reader_that_resolved_the_link_never_mixes(tmp_path):
    write(tmp_path, "one")
    readings = set()

    def reads(number: int, event: str, args: object) -> None:
        folder = Path(os.path.realpath(tmp_path / LATEST))
        readings.add(read(folder))

    with before_each_change(reads):
        for text in ("two", "three"):
            write(tmp_path, text, keep=1)
    assert readings == {"one", "two", "three"}
    close_locks(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x", b"9" * 5000])
def test_numbers_that_are_none_make_no_version(content, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".fsdp-export-version").write_bytes(content)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / ".fsdp-export-version")
    write(tmp_path, "one", keep=1)
    assert names_in(tmp_path) == ["000001"]
