"""Replace the checkpoint in a folder: a reader finds the old one, the new one or none that loads, never a mixture.

Files are written into a folder inside the folder. The name of that inner folder is the state of the replacement, and
what the next run does with it if the process at work died:

    .fsdp-export-writing    files arrive, the old checkpoint stands                 it is thrown away
    .fsdp-export-retire     committed; the old checkpoint's files are removed       it is carried to its end
    .fsdp-export-install    the old checkpoint is gone, the new files are moved in  it is carried to its end

No file of the new checkpoint ever stands beside one of the old. Files are moved in from what a loader asks for last to
what it asks for first, and removed in the opposite order: an index is there before its shards and until they are gone,
`config.json` is the last in and the first out, and the record of an export never stands beside half of its weights.

The process at work holds an flock on `lock` in the inner folder; it survives the renames and ends with the process.
On a file system without flock (some NFS and Lustre mounts) the process that `lock` names counts as holding it while it
lives, on another host for ever, and runs that begin in the same instant are not kept apart.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

from .errors import SinkError, listing

__all__ = ["MARKER", "Publication", "recover"]

MARKER = "fsdp_export.json"
"""Name of the record that an export leaves beside its weights: a JSON object whose `files` lists its files' names."""

_PREFIX = ".fsdp-export-"
_WRITING, _RETIRE, _INSTALL = (_PREFIX + state for state in ("writing", "retire", "install"))
_LOCK, _TOKEN, _RETIRED = _OWN_FILES = ("lock", "token", "retire.json")

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

_MAX_ATTEMPTS = 100
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP}
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space there and export again"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Make it writable, or export into another folder"),
}


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
    _inner: _InnerFolder
    _overwrite: bool
    _fsync: bool

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
        staging, done = folder / _WRITING, []
        with _sink_errors(folder):
            _make_folder(folder, fsync=fsync)
            while True:
                done.append(recover(folder))
                staging.mkdir(exist_ok=True)
                inner = _InnerFolder.take(staging)
                # Another process may have committed meanwhile. States only go forward, so the order of looking counts.
                if inner and not any(os.path.lexists(folder / state) for state in (_RETIRE, _INSTALL)):
                    break
                if inner:
                    inner.discard()
            recovered = "; ".join(filter(None, done)) or None
            publication = cls(folder, staging, secrets.token_hex(8), recovered, inner, overwrite, fsync)
            try:
                inner.clear()
                _refuse_foreign_weights(folder, overwrite=overwrite)
                (staging / _TOKEN).write_text(publication.token)
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
        with _sink_errors(self.folder):
            self._check(new)
            for name in self._inner.files() - new:
                (self.staging / name).unlink()
            retired = _files_to_retire(self.folder, new)
            (self.staging / _RETIRED).write_text(json.dumps(retired))
            if self._fsync:
                for name in sorted(new | {_RETIRED}):
                    _sync(self.staging / name)
                _sync_folders(self.staging, new)
            self._inner.rename(_RETIRE)
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
        unusable = {name for name in new if not _is_name(name) or name in _OWN_FILES}
        missing = new - self._inner.files() - unusable
        folders = {name for name in new - unusable if _is_real_folder(self.folder / name)}
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
    with _sink_errors(folder):
        for state in (_RETIRE, _INSTALL, _WRITING):
            inner = _InnerFolder.take(folder / state)
            if inner is None:
                continue
            try:
                if state == _WRITING:
                    inner.discard()
                    done.append("removed what an interrupted export had written")
                else:
                    _roll_forward(inner, fsync=True)
                    done.append("finished the publication of an interrupted export")
            finally:
                inner.release()
    return "; ".join(done) or None


@dataclass
class _InnerFolder:
    """An inner folder that this process has locked."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> _InnerFolder | None:
        """Lock an inner folder; return None when it is not there.

        Raises:
            SinkError: A live process holds it, or it is no folder.
        """
        for _ in range(_MAX_ATTEMPTS):
            if os.path.lexists(path) and not _is_real_folder(path):
                raise SinkError(f"{path.name} is not a folder", file=path.parent, fix="Remove it")
            try:
                inner = cls(path, os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666))
            except FileNotFoundError:
                return None
            try:
                inner._lock()
                with suppress(FileNotFoundError):
                    # Whoever held it until now may have renamed or removed it.
                    if os.path.samestat(os.fstat(inner.descriptor), (path / _LOCK).lstat()):
                        inner._sign(f"{os.getpid()}@{os.uname().nodename}")
                        return inner
            except BaseException:
                os.close(inner.descriptor)
                raise
            os.close(inner.descriptor)
        raise SinkError(f"{path / _LOCK} never stays the same file", fix="Export into another file system")

    def _lock(self) -> None:
        holder, fix = os.pread(self.descriptor, 256, 0).decode(errors="replace"), "Wait for it"
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                if not _is_alive(holder):
                    return
                fix = f"Wait for it, or remove {self.path / _LOCK} if it is gone"
            elif not isinstance(error, BlockingIOError):
                raise
            raise SinkError(
                "another process is exporting",
                file=self.path.parent,
                found=holder or "one that has just begun",
                fix=f"{fix}, or export into another folder",
            ) from None

    def _sign(self, holder: str) -> None:
        with suppress(OSError):  # A full disk must not keep an interrupted export from being cleaned up.
            os.pwrite(self.descriptor, holder.encode(), 0)
            os.ftruncate(self.descriptor, len(holder.encode()))

    @property
    def is_held(self) -> bool:
        """Whether the lock has not been given back."""
        return self.descriptor >= 0

    def files(self) -> set[str]:
        """Return the names of all files, also in folders, that are not the protocol's own."""
        files = (path for path in self.path.rglob("*") if not _is_real_folder(path))
        return {path.relative_to(self.path).as_posix() for path in files}.difference(_OWN_FILES)

    def rename(self, state: str) -> None:
        """Go on to another state."""
        self.path = self.path.rename(self.path.with_name(state))

    def clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.path.iterdir():
            if _is_real_folder(path):
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def discard(self) -> None:
        """Remove the folder and give the lock back."""
        self.clear()
        (self.path / _LOCK).unlink()
        # NFS keeps a file that is removed while open in its folder, under another name, until it is closed.
        os.close(self.descriptor)
        self.descriptor = -1
        with suppress(OSError):  # A process that came in between has taken the folder over.
            self.path.rmdir()

    def release(self) -> None:
        """Give the lock back and leave the folder as it is."""
        if self.is_held:
            self._sign("")
            os.close(self.descriptor)
            self.descriptor = -1


def _roll_forward(inner: _InnerFolder, *, fsync: bool) -> None:
    """Carry a committed replacement to its end, from wherever it stopped."""
    folder = inner.path.parent

    def settle(names: Iterable[str] = ()) -> None:
        if fsync:
            _sync_folders(folder, names)

    settle()
    if inner.path.name == _RETIRE:
        for names in _groups(_read_retired(inner.path / _RETIRED)):
            for name in names:
                _remove(folder, name)
            settle(names)
        inner.rename(_INSTALL)
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
    names = {path.name for path in folder.iterdir() if not _is_real_folder(path)}
    return {name for name in names if _rank(name)[0] < _NUM_WEIGHT_PATTERNS or name == "adapter_config.json"}


def _recorded_in(folder: Path) -> set[str]:
    """Return the names that the record of an earlier export lists; none if there is no record that can be read."""
    try:
        names = json.loads((folder / MARKER).read_bytes())["files"]
        return {name for name in names if _is_name(name)}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return set()


def _refuse_foreign_weights(folder: Path, *, overwrite: bool) -> None:
    foreign = _weights_in(folder) - _recorded_in(folder)
    if foreign and not overwrite:
        raise SinkError(
            "weights that no export recorded",
            file=folder,
            found=listing(foreign),
            fix="Replace them with overwrite=True (--overwrite), or export into another folder",
        )


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
        if not _is_real_folder(folder / part):
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
        return [name for name in json.loads(path.read_bytes()) if _is_name(name)]
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise SinkError(
            f"{path.parent.name}/{path.name} of an interrupted export is damaged",
            file=path.parent.parent,
            fix=f"Check the checkpoint that is there, remove {path.parent} and export again",
        ) from error


def _make_folder(folder: Path, *, fsync: bool) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise SinkError(
            "a file stands where a folder is needed",
            file=error.filename,
            fix="Remove it, or export into another folder",
        ) from None
    if fsync:
        for path in missing:
            _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno in _CANNOT_SYNC_FOLDERS and path.is_dir()):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Make the folder durable, and those inside it that hold, or held, these files."""
    inside = {folder / parent for name in names for parent in PurePosixPath(name).parents}
    for path in sorted(inside | {folder}, reverse=True):
        if path.is_dir():
            _sync(path)


def _is_name(name: object) -> bool:
    """Tell whether this is a relative path that stays in its folder, outside of the inner folders."""
    if not isinstance(name, str) or "\0" in name or name.startswith(_PREFIX):
        return False
    path = PurePosixPath(name)
    return name == str(path) and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_alive(holder: str) -> bool:
    """Tell whether a process `pid@host` may be running; one on another host always may."""
    process, _, host = holder.partition("@")
    if not process.isdigit() or host != os.uname().nodename:
        return bool(holder)
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _sink_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into ours, with the file's name."""
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"{error.filename or folder} cannot be changed ({error.strerror})",
            fix=_WAYS_OUT.get(error.errno or 0, "Export again: an interrupted export is first finished or removed"),
        ) from error
