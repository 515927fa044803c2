"""One safetensors file, or several, that all ranks write by offset into a hidden folder, which is then published."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import SinkError
from ..layout import FileLayout, lay_out
from ..memory import bytes_of
from ..plan import Plan
from ..publish import MARKER, Publication
from ..record import render
from ..spec import TensorInfo
from ..steps import Piece, StoredPiece
from .base import Delivery, Sink
from .copying import copy_bytes
from .ring import PinnedRing
from .writeback import Writeback

__all__ = ["FileSink", "single_file", "write_text"]

_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space, or write elsewhere"),
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or choose a smaller max_shard_size",
}

# For longer writes the kernel looks for longer runs of free memory, which a small virtual machine may have given back:
# ten times as slow. On the hosts of GPUs, which have plenty, they are the faster ones.
_WRITE_BYTES = 128 << 10

_log = logging.getLogger("fsdp_export")


def single_file(plan: Plan) -> list[FileLayout]:
    """Lay out all outputs of a plan in `model.safetensors`."""
    return [lay_out("model.safetensors", plan.outputs)]


class FileSink(Sink):
    """Writes safetensors files. Every rank writes the rows it is given, straight to where they belong.

    Args:
        folder: Where the files appear, all at once, when the export is complete.
        lay_out_files: Maps a plan to its files; called on every rank, with the same result.
        provenance: Tells what the export was made from, for the record beside the files; called on the first rank.
        overwrite: Whether weights that we did not write may be replaced.
        fsync: Whether to wait until the disk has the bytes.

    Attributes:
        layouts: The weight files of the last export.
        written: Names and sizes of all its files; on the first rank.
        removed: Names of earlier files that the last export removed; on the first rank.
        write_bytes: Bytes of rows on the CPU that are written at a time.
    """

    delivery: Delivery = "once"
    is_concurrent = True
    copies_files = True

    def __init__(
        self,
        folder: Path,
        *,
        lay_out_files: Callable[[Plan], list[FileLayout]] = single_file,
        provenance: Callable[[], Mapping[str, object]] = dict,
        overwrite: bool = False,
        fsync: bool = True,
    ) -> None:
        self.folder = folder
        self.layouts: list[FileLayout] = []
        self.removed: list[str] = []
        self.written: dict[str, int] = {}
        self.fsync = fsync
        self.write_bytes = _WRITE_BYTES
        self._lay_out_files, self._provenance = lay_out_files, provenance
        self._made_from: Mapping[str, object] = {}
        self._overwrite = overwrite
        self._plan: Plan | None = None
        self._publication: Publication | None = None
        self._staging: Path | None = None
        self._staging_descriptor = -1
        self._file_of: dict[str, FileLayout] = {}
        self._files: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._ring: PinnedRing | None = None
        self._writeback = Writeback(is_on=fsync)

    @property
    def destination(self) -> Path:
        """Where the files are once the export is complete."""
        return self.folder

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """Make the hidden folder, and in it every file with its header and full size; see `Sink.begin`.

        Raises:
            SinkError: The folder cannot be used, or has too little space.
        """
        self._plan, self.layouts = plan, self._lay_out_files(plan)
        self._made_from = self._provenance()
        self._publication = Publication.begin(self.folder, overwrite=self._overwrite, fsync=self.fsync)
        if self._publication.recovered:
            _log.warning("%s: %s", self.folder, self._publication.recovered)
        _check_free_space(self.folder, sum(layout.num_bytes for layout in self.layouts))
        for layout in self.layouts:
            path = self._publication.staging / layout.name
            with _write_errors(path, layout.num_bytes), path.open("xb") as file:
                file.write(layout.header)
                file.truncate(layout.num_bytes)
        where = [str(self.folder.absolute()), self._publication.staging.name]
        return json.dumps([*where, self._publication.token, _digest(self.layouts)])

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Look for the hidden folder; see `Sink.open`.

        Raises:
            SinkError: This rank does not see it, was told another one, or would lay out its files differently.
        """
        folder, name, token, digest = json.loads(ticket)
        self._staging = self.folder / name
        if not self._sees(token):
            mine = str(self.folder.absolute())
            raise SinkError(
                f"{socket.gethostname()} does not see what rank {plan.ranks[0]} made",
                file=folder,
                found=None if mine == folder else f"{mine} as the folder to write here",
                fix="Write to one folder that all hosts share, and in the same order on every rank",
            )
        if self._plan is not plan:
            self._plan, self.layouts = plan, self._lay_out_files(plan)
        if _digest(self.layouts) != digest:
            raise SinkError(
                "the ranks lay out the files differently",
                file=self.folder,
                fix="Give every rank the same format and max_shard_size",
            )
        self._file_of = {name: layout for layout in self.layouts for name in layout.offsets}

    def write(self, piece: Piece) -> None:
        """Write rows where they belong in their file; see `Sink.write`.

        Raises:
            SinkError: The file cannot be written.
        """
        tensor = piece.tensor.contiguous()
        if tensor.numel() == 0:
            return
        path, file, offset = self._place(piece.info, piece.first_row, tensor.nbytes)

        if tensor.device.type == "cpu":
            _write_all(file, path, bytes_of(tensor).numpy().data, offset, self.write_bytes)
            return

        def write(data: memoryview, at: int) -> None:
            _write_all(file, path, data, at, len(data))

        with self._opening:
            if self._ring is None:
                self._ring = PinnedRing(tensor.device.type)
            self._ring.write(tensor, offset, write)

    def copy(self, piece: StoredPiece) -> None:
        """Copy rows to where they belong, in the kernel where it can; see `Sink.copy`.

        Raises:
            SinkError: The file cannot be written.
            SourceError: The file that has them cannot be read, or is shorter.
        """
        if piece.num_bytes == 0:
            return
        path, file, offset = self._place(piece.info, piece.first_row, piece.num_bytes)
        for extent in piece.extents:
            with _write_errors(path, extent.num_bytes):
                copy_bytes(extent, file, offset)
            offset += extent.num_bytes

    def close(self) -> None:
        """Wait for the bytes of this rank; see `Sink.close`.

        Raises:
            SinkError: A file cannot be written.
        """
        if self._ring is not None:
            self._ring.wait()
        for path, file in self._files.items():
            with _write_errors(path):
                self._writeback.finish(file)
        self._release()

    def commit(self) -> None:
        """Add the other files and publish; see `Sink.commit`.

        Raises:
            SinkError: A file that must be there cannot be written, or the folder not be changed.
        """
        assert self._publication is not None
        assert self._plan is not None
        staging = self._publication.staging
        facts: dict[str, Mapping[str, object]] = {
            layout.name: {"tensors": len(layout.offsets)} for layout in self.layouts
        }
        facts.update(self.write_extras(staging, self._plan))
        sizes = {}
        for name in facts:
            with _write_errors(staging / name):
                sizes[name] = (staging / name).stat().st_size
        tied = {"tied": dict(self._plan.aliases)} if self._plan.aliases else {}
        files = {name: {"bytes": sizes[name], **facts[name]} for name in facts}
        write_text(staging / MARKER, render({**self._made_from, **tied}, files))
        self.removed = self._publication.publish([*facts, MARKER])
        self.written = sizes
        self._publication = None

    def write_extras(self, staging: Path, plan: Plan) -> dict[str, Mapping[str, object]]:
        """Write what belongs beside the weights. Called on the first rank, before the files are published.

        Args:
            staging: Where to.
            plan: What was exported.

        Returns:
            What the record says of each file, by its name relative to `staging`.

        Raises:
            SinkError: One that must be there cannot be written.
        """
        return {}

    def abort(self) -> None:
        """Remove the hidden folder; see `Sink.abort`."""
        with suppress(SinkError):
            self._release()
        if self._publication is not None:
            self._publication.abort()
            self._publication = None

    def _sees(self, token: str) -> bool:
        """Open the hidden folder, and tell whether it is the one with this token.

        Files are opened relative to it: a rank that outlives the first one never writes into a later export's folder,
        which has the same name.
        """
        assert self._staging is not None
        try:
            self._staging_descriptor = os.open(self._staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return (self._staging / "token").read_text() == token
        except OSError:
            return False

    def _place(self, info: TensorInfo, first_row: int, num_bytes: int) -> tuple[Path, int, int]:
        """Return where rows that are about to be written belong: the open file, and the offset in it."""
        assert self._staging is not None
        assert first_row * info.row_bytes + num_bytes <= info.num_bytes, f"more rows of {info.name} than it has"
        layout = self._file_of[info.name]
        path = self._staging / layout.name
        with self._opening, _write_errors(path):
            if path not in self._files:
                flags = os.O_WRONLY | os.O_CLOEXEC
                self._files[path] = os.open(layout.name, flags, dir_fd=self._staging_descriptor)
            file = self._files[path]
            self._writeback.wrote(file, num_bytes)
        return path, file, layout.offsets[info.name] + first_row * info.row_bytes

    def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._writeback.close()
        if self._staging_descriptor >= 0:
            os.close(self._staging_descriptor)
            self._staging_descriptor = -1
        with ExitStack() as stack:
            while self._files:
                path, file = self._files.popitem()
                # Some network file systems tell only now what could not be written.
                stack.enter_context(_write_errors(path))
                stack.callback(os.close, file)


def write_text(path: Path, text: str) -> None:
    """Write a text file that the checkpoint cannot do without.

    Args:
        path: Where to, in the hidden folder.
        text: Its content.

    Raises:
        SinkError: It cannot be written.
    """
    data = text.encode()
    with _write_errors(path, len(data)), path.open("xb") as file:
        file.write(data)


def _digest(layouts: Iterable[FileLayout]) -> str:
    return hashlib.sha256(b"".join(layout.header for layout in layouts)).hexdigest()


def _write_all(file: int, path: Path, data: memoryview, offset: int, bytes_at_a_time: int) -> None:
    begin = 0
    while begin < len(data):
        with _write_errors(path, len(data) - begin):
            room = bytes_at_a_time - (offset + begin) % bytes_at_a_time
            begin += os.pwrite(file, data[begin : begin + room], offset + begin)


@contextmanager
def _write_errors(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of the file system into ours, which name the file that one of the hidden folder was to become."""
    try:
        yield
    except OSError as error:
        what = "bring it to the disk" if num_bytes is None else f"write {num_bytes:,} bytes"
        raise SinkError(
            f"cannot {what} ({error.strerror})",
            file=path.parent.parent / path.name,
            fix=f"{_WAYS_OUT.get(error.errno or 0, 'Write elsewhere')}; an earlier export there is intact",
        ) from error


def _check_free_space(folder: Path, num_bytes: int) -> None:
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    # Some network file systems report nothing at all.
    if stats.f_blocks and free < num_bytes:
        raise SinkError(
            "too little free space",
            file=folder,
            expected=f"{num_bytes:,} bytes",
            found=f"{free:,} bytes",
            fix="Free some space, or write elsewhere; an earlier export there is intact",
        )
