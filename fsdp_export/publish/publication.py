"""The publication: a new checkpoint takes the place of the old one, file by file, in an order that readers survive."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

from ..errors import SinkError, listing
from ..paths import read_file
from .file_system import is_real_folder, make_folder, sink_errors, sync, sync_folders
from .inner_folder import INSTALL, OWN_FILES, PREFIX, RETIRE, RETIRED, TOKEN, WRITING, InnerFolder

__all__ = ["MARKER", "Publication", "files_replaced_by", "foreign_weights", "is_name", "recover"]

MARKER = "fsdp_export.json"
"""Name of the record that an export leaves beside its weights: a JSON object whose `files` lists its files' names."""

# From what a loader asks for last to what it asks for first. Weights stand from the form that loaders prefer to those
# they fall back to, so that removing them in the opposite order never uncovers another form.
_ORDER = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"model\.safetensors",
        r"model\.safetensors\.index\.json",
        r"model(\.safetensors)?-\d{5}-of-\d{5}\.safetensors",
        r"pytorch_model\.bin",
        r"pytorch_model\.bin\.index\.json",
        r"pytorch_model-.*-of-.*\.bin",
        r"consolidated.*\.safetensors(\.index\.json)?|adapter_model\.(safetensors|bin)|tf_model\.h5|flax_model\.msgpack",
        r"(?!.*config\.json\Z|fsdp_export\.json\Z).*",
        r".+config\.json",
        r"fsdp_export\.json",
        r"config\.json",
    )
)
_NUM_WEIGHT_PATTERNS = 7


@dataclass
class Publication:
    """One replacement of the checkpoint in a folder, from `begin` to `publish` or `abort`.

    One process, the lead, makes it; other processes only write into `staging`. Not collective.

    Attributes:
        folder: The folder whose checkpoint is replaced.
        staging: The inner folder into which the new files are written.
        token: A random word, also in the file `token` in `staging`: a process that reads it there sees the same folder.
        recovered: What was done about an earlier run that had been interrupted, for a log; None if nothing was.
    """

    folder: Path
    staging: Path
    token: str
    recovered: str | None
    _inner: InnerFolder
    _overwrite: bool
    _fsync: bool
    _unsynced: list[Path]

    @classmethod
    def begin(cls, folder: Path, *, overwrite: bool = False, fsync: bool = True) -> Publication:
        """Make the folder if it is missing, deal with an interrupted earlier run, and open a locked staging folder.

        Args:
            folder: Where the checkpoint is to be.
            overwrite: Whether weights that no export recorded may be replaced.
            fsync: Whether the outcome must also survive a loss of power.

        Raises:
            SinkError: The folder is a file or cannot be written, another live process exports into it, an inner
                folder is a link, or there are foreign weights and `overwrite` is false.
        """
        staging, done = folder / WRITING, []
        with sink_errors(folder):
            # Synced when it counts: a busy disk takes seconds, for which the loop would wait that saves asynchronously.
            unsynced = make_folder(folder)
            while True:
                done.append(recover(folder))
                staging.mkdir(exist_ok=True)
                inner = InnerFolder.take(staging)
                # Another process may have committed meanwhile. States only go forward, so the order of looking counts.
                if inner and not any(os.path.lexists(folder / state) for state in (RETIRE, INSTALL)):
                    break
                if inner:
                    inner.discard()
            recovered = "; ".join(filter(None, done)) or None
            token = secrets.token_hex(8)
            publication = cls(folder, staging, token, recovered, inner, overwrite, fsync, unsynced)
            try:
                inner.clear()
                _refuse_foreign_weights(folder, overwrite=overwrite)
                (staging / TOKEN).write_text(publication.token)
            except BaseException:
                publication.abort()
                raise
        return publication

    @property
    def is_committed(self) -> bool:
        """Whether the commit point is passed: the old checkpoint is gone or going, and only the new one can follow."""
        return self._inner.path != self.staging

    def publish(self, files: Sequence[str]) -> list[str]:
        """Replace the checkpoint in the folder by files of the staging folder.

        An error before the commit point leaves the old checkpoint as it is; after it, `abort` or the next run carries
        on. Every process must have closed its files.

        Args:
            files: Names of the new checkpoint's files, `MARKER` among them, relative to the staging folder and with
                `/` between parts. Anything else in the staging folder is dropped.

        Returns:
            The names of old files that were removed and not replaced, sorted.

        Raises:
            SinkError: A file is missing or has a name that is not possible, a folder stands where a file is to be,
                foreign weights appeared, or the file system refused something.
        """
        new = set(files)
        with sink_errors(self.folder):
            self._check(new)
            for name in self._inner.files() - new:
                (self.staging / name).unlink()
            retired = _files_to_retire(self.folder, new)
            (self.staging / RETIRED).write_text(json.dumps(retired))
            if self._fsync:
                for name in sorted(new | {RETIRED}):
                    sync(self.staging / name)
                sync_folders(self.staging, new)
                for path in self._unsynced:
                    sync(path)
            self._inner.rename(RETIRE)
            _roll_forward(self._inner, fsync=self._fsync)
        return sorted(set(retired) - new)

    def abort(self) -> None:
        """Remove the staging folder; after the commit point, try to carry on to the new checkpoint instead.

        Does nothing after `publish` or a first `abort`. Raises no error, which could hide an earlier one.
        """
        with suppress(OSError, SinkError):
            if self._inner.is_held and self.is_committed:
                _roll_forward(self._inner, fsync=self._fsync)
            elif self._inner.is_held:
                self._inner.discard()
        self._inner.release()

    def _check(self, new: set[str]) -> None:
        unusable = {name for name in new if not is_name(name) or name in OWN_FILES}
        missing = new - self._inner.files() - unusable
        folders = {name for name in new - unusable if is_real_folder(self.folder / name)}
        for what, names, fix in (
            ("file names that cannot be published", unusable, "Use relative names without '..'"),
            ("files that were not written", missing, "Check that every rank writes into the same folder"),
            ("folders where files are to be", folders, "Remove them, or export into another folder"),
        ):
            if names:
                raise SinkError(what, file=self.folder, found=listing(names), fix=fix)
        _refuse_foreign_weights(self.folder, overwrite=self._overwrite)


def recover(folder: Path) -> str | None:
    """Finish or clean up what an interrupted run left in a folder.

    Returns:
        What was done, for a log; None if there was nothing to do.

    Raises:
        SinkError: Another live process is at work in the folder, or the file system refused something.
    """
    done = []
    with sink_errors(folder):
        for state in (RETIRE, INSTALL, WRITING):
            inner = InnerFolder.take(folder / state)
            if inner is None:
                continue
            try:
                if state == WRITING:
                    inner.discard()
                    done.append("removed what an interrupted export had written")
                else:
                    _roll_forward(inner, fsync=True)
                    done.append("finished the publication of an interrupted export")
            finally:
                inner.release()
    return "; ".join(done) or None


def _roll_forward(inner: InnerFolder, *, fsync: bool) -> None:
    """Carry a committed replacement to its end, from wherever it stopped."""
    folder = inner.path.parent

    def settle(names: Iterable[str] = ()) -> None:
        if fsync:
            sync_folders(folder, names)

    settle()
    if inner.path.name == RETIRE:
        for names in _groups(_read_retired(inner.path / RETIRED)):
            for name in names:
                _remove(folder, name)
            settle(names)
        inner.rename(INSTALL)
        settle()
    for names in _groups(sorted(inner.files(), key=_rank)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (inner.path / name).rename(folder / name)
        settle(names)
    inner.discard()


def _groups(names: Iterable[str]) -> Iterator[list[str]]:
    """Split names in the order of `_ORDER`, or its opposite, where one kind ends: there order must outlast power."""
    for _, group in groupby(names, key=lambda name: _rank(name)[0]):
        yield list(group)


def _rank(name: str) -> tuple[int, str]:
    """Return the key by which files are moved in; in the opposite order they are removed."""
    return next(rank for rank, pattern in enumerate(_ORDER) if pattern.fullmatch(name)), name


def _weights_in(folder: Path) -> set[str]:
    """Return the names of what loaders take for weights; an adapter's config diverts them to other weights."""
    names = {path.name for path in folder.iterdir() if not is_real_folder(path)}
    return {name for name in names if _rank(name)[0] < _NUM_WEIGHT_PATTERNS or name == "adapter_config.json"}


def _recorded_in(folder: Path) -> set[str]:
    """Return the names that the record of an earlier export lists; none if there is no record that can be read."""
    try:
        names = json.loads(read_file(folder / MARKER))["files"]
        return {name for name in names if is_name(name)}
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def foreign_weights(folder: Path) -> set[str]:
    """Return the names of what loaders take for weights in a folder and no export recorded."""
    return _weights_in(folder) - _recorded_in(folder)


def _refuse_foreign_weights(folder: Path, *, overwrite: bool) -> None:
    foreign = foreign_weights(folder)
    if foreign and not overwrite:
        raise SinkError(
            "weights that no export recorded",
            file=folder,
            found=listing(foreign),
            fix="Replace them with overwrite=True (--overwrite), or export into another folder",
        )


def files_replaced_by(folder: Path, names: Iterable[str]) -> list[str]:
    """Return which files of a folder an export of files with these names would remove; none if there is no folder."""
    try:
        return _files_to_retire(folder, set(names)) if is_real_folder(folder.resolve()) else []
    except OSError as error:
        raise SinkError("a folder that cannot be read", file=folder, found=error.strerror or error) from error


def _files_to_retire(folder: Path, new: set[str]) -> list[str]:
    """Return what is removed before the new files are moved in, in that order.

    Foreign weights take their `config.json` with them; without one they would leave it to the new weights.
    """
    recorded, weights = _recorded_in(folder), _weights_in(folder)
    old = recorded | weights | {MARKER} | ({"config.json"} if weights - recorded else set())
    found = {name for name in old if _first_file(folder, name) == name}
    found |= {name for name in (_first_file(folder, name) for name in new) if name}
    return sorted(found, key=_rank, reverse=True)


def _first_file(folder: Path, name: str) -> str | None:
    """Return the first part of a path that is there and is no folder: the file, or a link or file in its way."""
    path = PurePosixPath(name)
    for part in (*list(reversed(path.parents))[1:], path):
        if not os.path.lexists(folder / part):
            return None
        if not is_real_folder(folder / part):
            return str(part)
    return None


def _remove(folder: Path, name: str) -> None:
    """Remove a file if it is there, and the folders that it leaves empty."""
    (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        for parent in list(PurePosixPath(name).parents)[:-1]:
            (folder / parent).rmdir()


def _read_retired(path: Path) -> list[str]:
    try:
        return [name for name in json.loads(read_file(path)) if is_name(name)]
    except (FileNotFoundError, ValueError, TypeError, RecursionError) as error:
        raise SinkError(
            f"{path.parent.name}/{path.name} of an interrupted export is damaged",
            file=path.parent.parent,
            fix=f"Check the checkpoint that is there, remove {path.parent} and export again",
        ) from error


def is_name(name: object) -> bool:
    """Tell whether this is a relative path that stays in its folder, outside of the inner folders."""
    if not isinstance(name, str) or "\0" in name or name.startswith(PREFIX):
        return False
    path = PurePosixPath(name)
    return name == str(path) and bool(path.parts) and not path.is_absolute() and ".." not in path.parts
