"""Writing the files beside the weights, with a digest of each."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from .sidecar import Sidecar, Sidecars

__all__ = ["write"]

_MAX_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


def write(sidecars: Sidecars, folder: Path, *, fsync: bool = True) -> dict[str, str]:
    """Write the files. One process calls this, for a folder in which none of them exists.

    What cannot be written is left out, warned about and added to `missing`. Permissions follow the umask.

    Args:
        sidecars: What was decided.
        folder: An existing folder.
        fsync: Whether to return only when the disk has the bytes.

    Returns:
        The SHA-256 of each file that was written, by its name.
    """
    written = {}
    for sidecar in sidecars.files:
        try:
            written[sidecar.name] = _write_file(sidecar, folder / sidecar.name, fsync=fsync)
        except OSError as error:
            sidecars.lacks(sidecar.name, error.strerror or str(error))
    return written


def _write_file(sidecar: Sidecar, path: Path, *, fsync: bool) -> str:
    path.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    file = path.open("xb")
    try:
        with file:
            if isinstance(sidecar.content, Path):
                with sidecar.content.open("rb") as source:
                    _check_size(source.fileno())
                    while chunk := source.read(_CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
            else:
                file.write(sidecar.content)
                digest.update(sidecar.content)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return digest.hexdigest()


def _check_size(descriptor: int) -> None:
    if os.fstat(descriptor).st_size > _MAX_BYTES:
        raise OSError(errno.EFBIG, "too large for what it is called")
