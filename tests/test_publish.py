"""The replacement of a checkpoint: at every instant the old one, the new one, or none that loads."""

import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from publish_faults import Tree, before_each_change, close_locks, dies_at, restore, tree
from publish_readers import OTHERS, SIDECARS, Checkpoint, Files, Readers, make_checkpoint
from transformers import Qwen2ForCausalLM
from transformers.utils import logging

from fsdp_export.errors import SinkError
from fsdp_export.publish import MARKER, Publication, recover

NUM_KILLS = 20
STATES = (".fsdp-export-writing", ".fsdp-export-retire", ".fsdp-export-install")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Two versions, single and sharded; the old has sidecars that the new one lacks, and the other way round."""
    logging.disable_progress_bar()
    sidecars = {1: SIDECARS[:2], 2: SIDECARS[1:]}
    made = {
        f"{age} {form}": make_checkpoint(
            tmp_path_factory.mktemp("checkpoint"), version, sharded=form == "sharded", sidecars=sidecars[version]
        )
        for age, version in (("old", 1), ("new", 2))
        for form in ("single", "sharded")
    }
    # What was not exported by us: weights in every form at once, each with other values.
    single, shards = made["old single"], make_checkpoint(tmp_path_factory.mktemp("other"), 3, sharded=True, sidecars=())
    decoy = Qwen2ForCausalLM(single.config).state_dict()
    torch.save(decoy, binary := tmp_path_factory.mktemp("decoy") / "pytorch_model.bin")
    files = {**shards.files, **single.files, "pytorch_model.bin": binary.read_bytes()}
    del files[MARKER], files[SIDECARS[0]]
    made["old foreign"] = replace(single, files=files, indexed=shards.indexed)
    return made


def export(folder: Path, files: Files, **options: bool) -> list[str]:
    publication = Publication.begin(folder, **options)
    for name, content in files.items():
        (publication.staging / name).parent.mkdir(parents=True, exist_ok=True)
        (publication.staging / name).write_bytes(content)
    return publication.publish(list(files))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory: a process that dies loses nothing that it has written, and syncing changes no outcome."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr("secrets.token_hex", lambda _: "token")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with TemporaryDirectory(dir=memory) as parent:
        yield Path(parent, "ckpt")


REPLACEMENTS = pytest.mark.parametrize(
    ("before", "after"),
    [(old, new) for old in ("old single", "old sharded", "old foreign") for new in ("new single", "new sharded")],
    ids=lambda name: name.replace(" ", "-"),
)


@REPLACEMENTS
def test_every_crash_point_of_a_publication_and_of_its_recovery(
    checkpoints: dict[str, Checkpoint], quick: Path, before: str, after: str
) -> None:
    old, new = checkpoints[before], checkpoints[after]
    readers = Readers(quick, old, new)
    start: Tree = {**OTHERS, **old.files}

    def states_before_each_change(state: Tree, function: Callable[[], object]) -> Iterator[Tree]:
        number = 0
        restore(quick, state)
        while dies_at(number, function, quick):
            readers.read()
            yield tree(quick)
            restore(quick, state)
            number += 1

    found, waiting = [], list(states_before_each_change(start, lambda: export(quick, new.files, overwrite=True)))
    assert readers.is_exactly(new)
    while waiting:
        state = waiting.pop()
        if state not in found:
            found.append(state)
            waiting += states_before_each_change(state, lambda: recover(quick))
            is_committed = not any(name.startswith(STATES[0]) for name in state)
            assert readers.is_exactly(new if is_committed and state != start else old)
    assert len(found) > 20

    for state in found:
        restore(quick, state)
        export(quick, new.files, overwrite=True)
        assert readers.is_exactly(new)


@REPLACEMENTS
def test_what_a_loss_of_power_leaves_is_no_mixture(
    checkpoints: dict[str, Checkpoint],
    quick: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
) -> None:
    old, new = checkpoints[before], checkpoints[after]
    readers = Readers(quick, old, new)
    changes: list[tuple[str, tuple[Any, ...]]] = []
    durable: list[tuple[Tree, list[tuple[str, tuple[Any, ...]]]]] = []

    def remember(number: int, event: str, args: tuple[Any, ...]) -> None:
        changes.append((event, args))

    def sync(descriptor: int) -> None:
        if opened(descriptor) in {quick, quick / STATES[0]}:
            durable.append((tree(quick), changes[:]))
            changes.clear()

    restore(quick, {**OTHERS, **old.files})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with before_each_change(remember):
            export(quick, new.files, overwrite=True)
    durable.append(({}, changes))

    # Between two syncs of the folder every subset of the changes may have reached the disk.
    num_states = 0
    for (state, _), (_, lost) in pairwise(durable):
        for size in range(len(lost) + 1):
            for kept in combinations(lost, size):
                restore(quick, state)
                for event, args in kept:
                    redo(quick, event, args)
                num_states += 1
                readers.read()
                recover(quick)
                assert readers.is_exactly(new) or readers.is_exactly(old)
    assert num_states > 50


def redo(folder: Path, event: str, args: tuple[Any, ...]) -> None:
    """Repeat a change, in the inner folder under the name that it has if its renaming was lost."""
    paths = [str(path) for path in args[: 2 if event == "os.rename" else 1]]
    inner = next((state for state in STATES if (folder / state).exists()), "")
    renames_it = len(paths) == 2 and all(Path(path).name in STATES for path in paths)
    if inner and not renames_it:
        paths = [re.sub("|".join(STATES), inner, path) for path in paths]
    # A change that needs one that was lost is lost too; a folder that is there is as good as made.
    with suppress(OSError):
        getattr(os, event.removeprefix("os."))(*paths)


@REPLACEMENTS
def test_an_error_of_the_file_system_at_any_change(
    checkpoints: dict[str, Checkpoint], quick: Path, before: str, after: str
) -> None:
    old, new = checkpoints[before], checkpoints[after]
    readers = Readers(quick, old, new)
    message = rf"{quick}.* cannot be changed \(No space left on device\)\. Free space there and export again\."
    outcomes = set()
    for number in count():
        restore(quick, {**OTHERS, **old.files})
        failures: list[str] = []
        publication, error = None, None
        try:
            with before_each_change(partial(fail_at, number, failures)):
                publication = Publication.begin(quick, overwrite=True)
                for name, content in new.files.items():
                    (publication.staging / name).write_bytes(content)
                publication.publish(list(new.files))
        except (SinkError, OSError) as caught:
            error = caught
        readers.read()
        if not failures:
            break
        assert not isinstance(error, SinkError) or re.fullmatch(message, str(error))
        if publication:
            publication.abort()
        if not publication or failures == ["os.rmdir"]:
            recover(quick)
        committed = publication is not None and publication.is_committed
        outcomes.add((committed, type(error)))
        assert readers.is_exactly(new if committed else old)
    # What fails after the commit point is retried by `abort`; only signing and removing the inner folder may fail.
    none = type(None)
    assert outcomes == {(False, SinkError), (False, OSError), (True, SinkError), (True, none)}


def fail_at(wanted: int, failures: list[str], number: int, event: str, args: tuple[Any, ...]) -> None:
    if number == wanted:
        failures.append(event)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), args[0] if event != "os.truncate" else "lock")


def test_a_process_that_is_killed_at_random(checkpoints: dict[str, Checkpoint], folder: Path, tmp_path: Path) -> None:
    one, two = checkpoints["old sharded"], checkpoints["new single"]
    for name, checkpoint in (("one", one), ("two", two)):
        restore(tmp_path / name, dict(checkpoint.files))
    restore(folder, {**OTHERS, **one.files})
    readers = Readers(folder, one, two)
    rng = random.Random(9)
    command = [sys.executable, str(HERE / "publish_loop.py"), str(folder), str(tmp_path / "one"), str(tmp_path / "two")]
    for _ in range(NUM_KILLS):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(HERE.parent)}
        ) as run:
            assert run.stdout
            assert run.stdout.readline() == b"published\n"
            time.sleep(rng.random() * 0.1)
            run.kill()
        assert run.returncode == -signal.SIGKILL
        readers.read()
    recover(folder)
    assert readers.is_exactly(one) or readers.is_exactly(two)


def opened(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def recorded(**files: str) -> Files:
    """Return the files of an export, dots in their names written as two underscores, and its record of them."""
    named = {name.replace("__", "."): content.encode() for name, content in files.items()}
    return {**named, MARKER: json.dumps({"files": [*named]}).encode()}


OLD = recorded(model__safetensors="old", config__json="old", vocab__json="old")
NEW = recorded(model__safetensors="new", config__json="new", merges__txt="new")


def interrupted(folder: Path, state: str, files: Files = NEW) -> None:
    """Leave a folder as a process that died in this state leaves it."""

    def act(number: int, event: str, args: tuple[Any, ...]) -> None:
        if (folder / state).exists() and event != "open":
            raise InterruptedError

    with pytest.raises(SinkError), before_each_change(act):
        export(folder, files)
    close_locks(folder)
    assert (folder / state).is_dir()


def another_process(code: str, folder: Path) -> "subprocess.Popen[str]":
    program = f"from pathlib import Path\nfrom fsdp_export.publish import *\nfolder = Path({str(folder)!r})\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )


def test_a_folder_that_another_process_exports_into_is_refused(folder: Path) -> None:
    with another_process("one = Publication.begin(folder)\nprint(flush=True)\ninput()", folder) as other:
        assert other.stdin
        assert other.stdout
        other.stdout.readline()
        for function in (recover, Publication.begin):
            with pytest.raises(SinkError) as refused:
                function(folder)
            assert str(refused.value) == (
                f"another process is exporting in {folder}: found {other.pid}@{os.uname().nodename}. "
                "Wait for it, or export into another folder."
            )
        other.kill()
    publication = Publication.begin(folder)
    assert publication.recovered == "removed what an interrupted export had written"
    publication.abort()
    assert not tree(folder)


@pytest.mark.parametrize("state", STATES[1:])
def test_two_processes_that_recover_at_once(folder: Path, state: str) -> None:
    export(folder, OLD)
    for _ in range(3):
        interrupted(folder, state)
        code = "input()\ntry:\n    print(recover(folder))\nexcept Exception as error:\n    print(error)"
        others = [another_process(code, folder) for _ in range(2)]
        answers = [other.communicate("\n")[0].strip() for other in others]
        assert "finished the publication of an interrupted export" in answers
        assert tree(folder) == NEW


@pytest.mark.parametrize("state", STATES)
def test_a_recovery_in_the_middle_of_another_is_refused(quick: Path, state: str) -> None:
    export(quick, OLD)
    interrupted(quick, state)
    answers = []

    def second(number: int, event: str, args: tuple[Any, ...]) -> None:
        try:
            answers.append(recover(quick))
        except SinkError as error:
            answers.append(str(error)[:29])

    with before_each_change(second):
        recover(quick)
    # The first change is to open the lock, so that the second process comes first; the last is `rmdir`.
    assert answers[0] is not None
    assert answers[0].startswith(("finished", "removed"))
    assert not any((quick / state).exists() for state in STATES)


def test_a_lock_that_was_removed_before_it_was_taken_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(folder, STATES[0])
    flock, others = fcntl.flock, []

    def lock_after_another_run(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        others.append(Publication.begin(folder))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_another_run)
    with pytest.raises(SinkError, match="another process is exporting"):
        recover(folder)
    assert (others[0].staging / "token").exists()
    others[0].abort()


def test_a_lock_that_never_stays_the_same_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with pytest.raises(SinkError) as refused:
        Publication.begin(folder)
    assert str(refused.value) == (
        f"{folder / STATES[0] / 'lock'} never stays the same file. Export into another file system."
    )


@pytest.mark.parametrize("lives", [False, True], ids=["dies", "lives"])
@pytest.mark.parametrize("at", range(6))
def test_every_change_of_one_process_between_two_of_another(quick: Path, at: int, lives: bool) -> None:
    """Another process gets as far as its n-th change, and dies or stays there, while `begin` looks for its place."""
    outcomes = set()

    def begin_while_another_exports(number: int) -> bool:
        got_there = False

        def other(current: int, event: str, args: tuple[Any, ...]) -> None:
            nonlocal got_there
            if current == at:
                got_there = dies_at(number, lambda: export(quick, NEW), quick, lives=lives)

        try:
            with before_each_change(other):
                mine = Publication.begin(quick)
            outcomes.add(mine.recovered)
            assert [state for state in STATES if (quick / state).exists()] == [STATES[0]]
            mine.abort()
        except SinkError as error:
            outcomes.add(str(error)[:28])
        return got_there

    restore(quick, dict(OLD))
    number = 0
    while begin_while_another_exports(number):
        close_locks(quick)
        recover(quick)
        assert tree(quick) in (OLD, NEW)
        restore(quick, dict(OLD))
        number += 1
    assert number > 20 or at > 2
    assert lives == ("another process is exporting" in outcomes) or at > 2


def test_a_folder_is_made_and_an_export_leaves_nothing_but_its_files(folder: Path) -> None:
    target = folder / "a" / "b"
    assert recover(target) is None
    publication = Publication.begin(target)
    assert publication.recovered is None
    assert (publication.staging / "token").read_text() == publication.token
    for name, content in {**NEW, "left.tmp": b"x", "scrap/left.tmp": b"x"}.items():
        (publication.staging / name).parent.mkdir(exist_ok=True)
        (publication.staging / name).write_bytes(content)
    assert not publication.is_committed
    assert publication.publish(list(NEW)) == []
    assert publication.is_committed
    assert tree(target) == NEW


@pytest.mark.parametrize("state", STATES)
def test_what_is_done_about_an_interrupted_run_is_said(folder: Path, state: str) -> None:
    export(folder, OLD)
    interrupted(folder, state)
    publication = Publication.begin(folder)
    assert publication.recovered == {
        STATES[0]: "removed what an interrupted export had written",
        STATES[1]: "finished the publication of an interrupted export",
        STATES[2]: "finished the publication of an interrupted export",
    }.get(state)
    publication.abort()
    assert tree(folder) == (OLD if state == STATES[0] else NEW)


def test_old_files_that_are_not_replaced_are_removed_and_listed(folder: Path) -> None:
    export(folder, OLD)
    (folder / "notes.txt").write_text("mine")
    assert export(folder, recorded(policy__safetensors="bare")) == ["config.json", "model.safetensors", "vocab.json"]
    assert export(folder, NEW) == ["policy.safetensors"]
    assert tree(folder) == {**NEW, "notes.txt": b"mine"}


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "adapter_config.json",
        "tf_model.h5",
        "flax_model.msgpack",
    ],
)
def test_weights_that_no_export_recorded_are_replaced_only_on_request(folder: Path, name: str) -> None:
    before: Tree = {name: b"foreign", "config.json": b"foreign", "tokenizer.json": b"foreign"}
    restore(folder, before)
    with pytest.raises(SinkError) as refused:
        export(folder, NEW)
    assert str(refused.value) == (
        f"weights that no export recorded in {folder}: found {name}. "
        "Replace them with overwrite=True (--overwrite), or export into another folder."
    )
    assert tree(folder) == before
    bare = recorded(policy__safetensors="bare")
    assert export(folder, bare, overwrite=True) == sorted(["config.json", name])
    assert tree(folder) == {**bare, "tokenizer.json": b"foreign"}


def test_other_files_are_left_alone(folder: Path) -> None:
    others: Tree = {
        "model.fp16.safetensors": b"",
        "model_world_size_2_rank_0.pt": b"",
        "my-model-00001-of-00002.safetensors": b"",
        "optimizer.bin": b"",
        "__0_0.distcp": b"",
        "odd\nconfig.json\n": b"",
        "pytorch_model.bin": None,
        "config.json": b"prepared",
    }
    restore(folder, others)
    bare = recorded(policy__safetensors="bare")
    assert export(folder, bare) == []
    assert tree(folder) == {**others, **bare}


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"files": null}', '{"files": ["config.json"]}'])
def test_a_record_that_does_not_list_the_weights_makes_them_foreign(folder: Path, record: str) -> None:
    restore(folder, {"model.safetensors": b"", MARKER: record.encode()})
    with pytest.raises(SinkError, match="weights that no export recorded"):
        Publication.begin(folder)


def test_weights_that_appear_during_an_export_are_not_lost(folder: Path) -> None:
    publication = Publication.begin(folder)
    (publication.staging / "model.safetensors").write_bytes(b"new")
    (folder / "pytorch_model.bin").write_bytes(b"meanwhile")
    with pytest.raises(SinkError, match=r"found pytorch_model\.bin"):
        publication.publish(["model.safetensors"])
    publication.abort()
    assert tree(folder) == {"pytorch_model.bin": b"meanwhile"}


def test_a_record_cannot_reach_outside_of_its_folder(folder: Path, tmp_path: Path) -> None:
    outside: Tree = {"victim": b"mine", "deep": None, "deep/victim": b"mine"}
    restore(tmp_path / "outside", outside)
    names = ["../outside/victim", str(tmp_path / "outside" / "victim"), "link/victim", "", ".", "a\0b", 7, "sub"]
    restore(folder, {"sub": None, MARKER: json.dumps({"files": names}).encode()})
    (folder / "link").symlink_to(tmp_path / "outside")
    assert export(folder, NEW) == []
    assert tree(tmp_path / "outside") == outside
    assert (folder / "link").is_symlink()
    assert (folder / "sub").is_dir()


def test_files_in_folders(folder: Path, tmp_path: Path) -> None:
    nested = {"model.safetensors": b"", "chat/templates/a": b"new", "chat/b": b"new"}
    nested[MARKER] = json.dumps({"files": list(nested)}).encode()
    restore(tmp_path / "outside", {"b": b"mine"})
    folder.mkdir()
    (folder / "chat").symlink_to(tmp_path / "outside")
    assert export(folder, nested) == ["chat"]
    assert tree(folder) == {**nested, "chat": None, "chat/templates": None}
    assert tree(tmp_path / "outside") == {"b": b"mine"}
    (folder / "chat" / "c").write_bytes(b"mine")
    assert export(folder, NEW) == ["chat/b", "chat/templates/a"]
    assert tree(folder) == {**NEW, "chat": None, "chat/c": b"mine"}


@pytest.mark.parametrize("exists", [True, False], ids=["linked", "dangling"])
def test_a_link_is_replaced_and_not_followed(folder: Path, tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "target"
    if exists:
        target.write_bytes(b"theirs")
    folder.mkdir()
    (folder / "config.json").symlink_to(target)
    export(folder, NEW)
    assert tree(folder) == NEW
    assert not (folder / "config.json").is_symlink()
    assert target.read_bytes() == b"theirs" if exists else not target.exists()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ["link", "file"])
def test_an_inner_folder_that_is_none_is_refused(folder: Path, tmp_path: Path, state: str, kind: str) -> None:
    folder.mkdir()
    (tmp_path / "target").mkdir()
    if kind == "link":
        (folder / state).symlink_to(tmp_path / "target")
    else:
        (folder / state).touch()
    with pytest.raises(SinkError) as refused:
        Publication.begin(folder)
    assert str(refused.value) == f"{state} is not a folder in {folder}. Remove it."
    assert not tree(tmp_path / "target")


@pytest.mark.parametrize("below", ["", "x/y"], ids=["at-it", "above-it"])
def test_a_file_where_the_folder_is_to_be(folder: Path, below: str) -> None:
    folder.touch()
    with pytest.raises(SinkError) as refused:
        Publication.begin(folder / below)
    assert str(refused.value) == (
        f"a file stands where a folder is needed in {folder / below if not below else folder / 'x/y'}. "
        "Remove it, or export into another folder."
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["../x", "/x", "a//b", "lock", ".fsdp-export-retire/x", "model.safetensors"],
            "file names that cannot be published in {}: found ../x, .fsdp-export-retire/x, /x, a//b, lock. Use {}.",
        ),
        (
            ["model.safetensors", "config.json"],
            "files that were not written in {}: found config.json. Check that every rank writes into the same folder.",
        ),
        (
            ["model.safetensors", "merges.txt"],
            "folders where files are to be in {}: found merges.txt. Remove them, or export into another folder.",
        ),
    ],
    ids=["names", "missing", "folders"],
)
def test_what_cannot_be_published_is_refused_before_the_commit_point(
    folder: Path, names: list[str], message: str
) -> None:
    export(folder, OLD)
    (folder / "merges.txt").mkdir()
    publication = Publication.begin(folder)
    for name in ("model.safetensors", "merges.txt"):
        (publication.staging / name).write_bytes(b"new")
    with pytest.raises(SinkError) as refused:
        publication.publish(names)
    assert str(refused.value) == message.format(folder, "relative names without '..'")
    publication.abort()
    assert tree(folder) == {**OLD, "merges.txt": None}


def test_abort_does_nothing_twice_nor_after_publish(folder: Path) -> None:
    export(folder, OLD)
    publication = Publication.begin(folder)
    publication.abort()
    other = Publication.begin(folder)
    publication.abort()
    assert other.staging.is_dir()
    (other.staging / "model.safetensors").write_bytes(b"new")
    other.publish(["model.safetensors"])
    third = Publication.begin(folder, overwrite=True)
    other.abort()
    assert third.staging.is_dir()
    third.abort()
    assert tree(folder) == {"model.safetensors": b"new"}


def test_an_abort_that_cannot_remove_the_staging_folder_leaves_it_to_the_next_run(folder: Path) -> None:
    def fail(number: int, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.remove":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    publication = Publication.begin(folder)
    with before_each_change(fail):
        publication.abort()
    assert publication.staging.is_dir()
    assert recover(folder) == "removed what an interrupted export had written"


def test_permissions_follow_the_umask(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        publication = Publication.begin(folder)
        assert mode(folder) == mode(publication.staging) == 0o750
        assert mode(publication.staging / "lock") == mode(publication.staging / "token") == 0o640
        (publication.staging / "model.safetensors").touch()
        (publication.staging / "sub").mkdir()
        (publication.staging / "sub" / "run.sh").touch(0o755)
        publication.publish(["model.safetensors", "sub/run.sh"])
    finally:
        os.umask(before)
    assert mode(folder / "model.safetensors") == 0o640
    assert mode(folder / "sub") == mode(folder / "sub" / "run.sh") == 0o750


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_syncs_stand_between_the_changes_whose_order_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def short(path: Path) -> str:
        return os.path.relpath(path, folder.parent).replace("ckpt/.fsdp-export-", "")

    def remember(number: int, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename":
            events.append(f"{short(args[0])} > {short(args[1])}")
        elif event == "os.remove":
            events.append(f"remove {short(args[0])}")

    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"sync {short(opened(fd))}"))
    sharded = recorded(**{"model-00001-of-00001__safetensors": "", "model__safetensors__index__json": "", **EXTRAS})
    with before_each_change(remember):
        export(folder, sharded)
        assert "sync ." in events[: events.index("writing > retire")]
        events.clear()
        export(folder, NEW)
    assert events == [
        "sync writing/config.json",
        "sync writing/fsdp_export.json",
        "sync writing/merges.txt",
        "sync writing/model.safetensors",
        "sync writing/retire.json",
        "sync writing",
        "writing > retire",
        "sync ckpt",
        "remove ckpt/config.json",
        "sync ckpt",
        "remove ckpt/fsdp_export.json",
        "sync ckpt",
        "remove ckpt/tokenizer_config.json",
        "sync ckpt",
        "remove ckpt/vocab.json",
        "remove ckpt/policy.safetensors",
        "sync ckpt",
        "remove ckpt/model-00001-of-00001.safetensors",
        "sync ckpt",
        "remove ckpt/model.safetensors.index.json",
        "sync ckpt",
        "retire > install",
        "sync ckpt",
        "install/model.safetensors > ckpt/model.safetensors",
        "sync ckpt",
        "install/merges.txt > ckpt/merges.txt",
        "sync ckpt",
        "install/fsdp_export.json > ckpt/fsdp_export.json",
        "sync ckpt",
        "install/config.json > ckpt/config.json",
        "sync ckpt",
        *events[-3:],
    ]
    assert events[-1] == "remove install/lock"


EXTRAS = {"config__json": "", "tokenizer_config__json": "", "vocab__json": "", "policy__safetensors": ""}


def test_without_fsync_nothing_is_synced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("synced"))
    export(folder, OLD, fsync=False)
    assert export(folder, NEW, fsync=False) == ["vocab.json"]


def test_a_file_system_that_cannot_sync_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", sync)
    export(folder, NEW)
    assert tree(folder) == NEW


@pytest.mark.parametrize(
    ("number", "reason", "fix"),
    [
        (errno.EDQUOT, "Disk quota exceeded", "Free space there and export again"),
        (errno.EIO, "Input/output error", "Export again: an interrupted export is first finished or removed"),
    ],
    ids=["quota", "hardware"],
)
def test_a_sync_that_fails_leaves_the_old_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, fix: str
) -> None:
    export(folder, OLD)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    publication = Publication.begin(folder)
    (publication.staging / "model.safetensors").write_bytes(b"new")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SinkError) as failed:
        publication.publish(["model.safetensors"])
    assert str(failed.value) == f"{publication.staging / 'model.safetensors'} cannot be changed ({reason}). {fix}."
    publication.abort()
    assert tree(folder) == OLD


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    def fail(number: int, event: str, args: tuple[Any, ...]) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(args[0]))

    with pytest.raises(SinkError) as failed, before_each_change(fail):
        Publication.begin(folder)
    assert str(failed.value) == (
        f"{folder} cannot be changed (Read-only file system). Make it writable, or export into another folder."
    )


def test_a_list_of_files_to_remove_that_power_took_is_refused(folder: Path) -> None:
    export(folder, OLD)
    interrupted(folder, STATES[1])
    (folder / STATES[1] / "retire.json").write_bytes(b"")
    for function in (recover, Publication.begin):
        with pytest.raises(SinkError) as refused:
            function(folder)
        assert str(refused.value) == (
            f"{STATES[1]}/retire.json of an interrupted export is damaged in {folder}. "
            f"Check the checkpoint that is there, remove {folder / STATES[1]} and export again."
        )


HOST = os.uname().nodename


@pytest.mark.parametrize(
    ("holder", "is_refused"),
    [
        (f"{os.getpid()}@{HOST}", True),
        (f"1@{HOST}", True),
        ("7@elsewhere", True),
        ("nonsense", True),
        ("", False),
        (f"{2**22 + 1}@{HOST}", False),
    ],
    ids=["this-process", "another-process", "another-host", "nonsense", "nobody", "dead"],
)
def test_without_flock_the_name_in_the_lock_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, holder: str, is_refused: bool
) -> None:
    def no_flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    restore(folder, {STATES[0]: None, f"{STATES[0]}/lock": holder.encode()})
    if is_refused:
        with pytest.raises(SinkError) as refused:
            Publication.begin(folder)
        assert str(refused.value) == (
            f"another process is exporting in {folder}: found {holder}. Wait for it, or remove "
            f"{folder / STATES[0] / 'lock'} if it is gone, or export into another folder."
        )
        (folder / STATES[0] / "lock").unlink()
    export(folder, NEW)
    assert tree(folder) == NEW
