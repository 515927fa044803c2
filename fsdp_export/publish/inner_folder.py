"""The inner folder: locked by the process at work, its name the state of the publication."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import SinkError
from .file_system import is_real_folder

__all__ = ["INSTALL", "LOCK", "OWN_FILES", "PREFIX", "RETIRE", "RETIRED", "TOKEN", "WRITING", "InnerFolder"]

PREFIX = ".fsdp-export-"
WRITING, RETIRE, INSTALL = (PREFIX + state for state in ("writing", "retire", "install"))
LOCK, TOKEN, RETIRED = OWN_FILES = ("lock", "token", "retire.json")

_MAX_ATTEMPTS = 100
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass
class InnerFolder:
    """An inner folder that this process has locked."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> InnerFolder | None:
        """Lock an inner folder; return None when it is not there.

        Raises:
            SinkError: A live process holds it, or it is no folder.
        """
        for _ in range(_MAX_ATTEMPTS):
            if os.path.lexists(path) and not is_real_folder(path):
                raise SinkError(f"{path.name} is not a folder", file=path.parent, fix="Remove it")
            try:
                inner = cls(path, os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666))
            except FileNotFoundError:
                return None
            try:
                inner._lock()
                with suppress(FileNotFoundError):
                    # Whoever held it until now may have renamed or removed it.
                    if os.path.samestat(os.fstat(inner.descriptor), (path / LOCK).lstat()):
                        inner._sign(f"{os.getpid()}@{os.uname().nodename}")
                        return inner
            except BaseException:
                os.close(inner.descriptor)
                raise
            os.close(inner.descriptor)
        raise SinkError(f"{path / LOCK} never stays the same file", fix="Export into another file system")

    def _lock(self) -> None:
        holder, fix = os.pread(self.descriptor, 256, 0).decode(errors="replace"), "Wait for it"
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                if not _is_alive(holder):
                    return
                fix = f"Wait for it, or remove {self.path / LOCK} if it is gone"
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
        files = (path for path in self.path.rglob("*") if not is_real_folder(path))
        return {path.relative_to(self.path).as_posix() for path in files}.difference(OWN_FILES)

    def rename(self, state: str) -> None:
        """Go on to another state."""
        self.path = self.path.rename(self.path.with_name(state))

    def clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.path.iterdir():
            if is_real_folder(path):
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    def discard(self) -> None:
        """Remove the folder and give the lock back."""
        self.clear()
        (self.path / LOCK).unlink()
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
