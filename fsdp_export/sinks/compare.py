"""Compares what an export delivers with what was written: the same walk, whose pieces go against a folder's rows."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import ComparisonError, ExportError
from ..memory import bytes_of
from ..plan import Plan
from ..spec import TensorInfo, TensorSpec
from ..steps import Piece
from ..table import dtype_name
from ..verification import Difference, Verification
from .base import Delivery, Sink
from .compare_files import compare_files

__all__ = ["CompareSink", "Written"]

_MAX_DIFFERENCES = 20
# Memory of this size is used again and again, where larger ones are new, zeroed pages every time.
_CHUNK_BYTES = 4 << 20
_BLOCK_ELEMENTS = 1 << 18
_WORD_BYTES = 8


class Written(Protocol):
    """A folder that was written, read row by row from any number of threads.

    Attributes:
        specs: Its tensors.
    """

    specs: tuple[TensorSpec, ...]

    def rows(self, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        """Return rows of a tensor, on the CPU."""
        ...

    def file_of(self, name: str) -> Path:
        """Return the file that has a tensor."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class CompareSink(Sink):
    """Compares every piece with the rows that a folder has of it, byte by byte. Writes nothing.

    A difference is no error, so that all of them are found: ask `card` for this rank's, and `verification` for
    everyone's. Pieces may come from several threads.

    Args:
        folder: What is read back.
        open_written: Opens it; called on every rank.
    """

    delivery: Delivery = "once"
    is_concurrent = True

    def __init__(self, folder: Path, open_written: Callable[[], Written]) -> None:
        self.folder = folder
        self._open_written = open_written
        self._written: Written | None = None
        self._plan: Plan | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._differences: dict[str, Difference] = {}
        self._file_differences: list[Difference] = []
        self._num_files: int | None = None
        self._lock = threading.Lock()

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Open the folder and compare names, shapes and dtypes; see `Sink.open`.

        Raises:
            ComparisonError: It cannot be read, or its files do not fit together.
        """
        try:
            self._written = self._open_written()
        except ExportError as error:
            raise ComparisonError(f"what was written cannot be read back: {error}") from error
        files = {self._written.file_of(spec.name) for spec in self._written.specs if spec.num_bytes}
        for file in files:
            _drop_pages(file)
        self._plan, self._differences = plan, {}
        self._specs = {spec.name: spec for spec in self._written.specs}
        for output in plan.outputs:
            self._compare_info(output)
        expected = {output.name for output in plan.outputs}
        for spec in self._written.specs:
            if spec.name not in expected:
                self._add(Difference("unexpected", spec.name, self._file(spec.name), found=_describe(spec)))
        if rank == plan.ranks[0]:
            compared = compare_files(self.folder, files, are_equal=not self._differences)
            self._file_differences, self._num_files = compared.differences, compared.num_files

    def write(self, piece: Piece) -> None:
        """Compare the bytes of rows; see `Sink.write`."""
        info = piece.info
        spec = self._specs.get(info.name)
        if spec is None:
            return
        expected = piece.tensor.detach().cpu().contiguous()
        if not info.shape:
            self._compare(spec, 0, expected)
            return
        rows = max(_CHUNK_BYTES // max(info.row_bytes, 1), 1)
        for first in range(0, expected.shape[0], rows):
            self._compare(spec, piece.first_row + first, expected[first : first + rows])

    def close(self) -> None:
        """Close the folder."""
        if self._written is not None:
            self._written.close()
            self._written = None

    def abort(self) -> None:
        """Close the folder."""
        self.close()

    def card(self) -> str:
        """Return what this rank found, for `verification`; empty if all was equal and it looked at tensors alone."""
        assert self._plan is not None
        if not self._differences and not self._file_differences and self._num_files is None:
            return ""
        outputs = [output.name for output in self._plan.outputs]
        differing = [name in self._differences for name in outputs]
        ordered = dict.fromkeys([*outputs, *self._differences])
        found = [asdict(self._differences[name]) for name in ordered if name in self._differences]
        of_files = list(map(asdict, self._file_differences))
        return json.dumps(
            {
                "differing": "".join("01"[differs] for differs in differing),
                "num_unexpected": len(found) - sum(differing),
                "found": found[:_MAX_DIFFERENCES],
                "num_of_files": len(of_files),
                "of_files": of_files[:_MAX_DIFFERENCES],
                "num_files": self._num_files,
            }
        )

    def verification(self, cards: Sequence[str], seconds: float) -> Verification:
        """Join what all ranks found.

        Args:
            cards: What `card` returned on each of them.
            seconds: How long it took.
        """
        assert self._plan is not None
        outputs = [output.name for output in self._plan.outputs]
        found = [json.loads(card) for card in cards if card]
        differing = {name for each in found for name, bit in zip(outputs, each["differing"], strict=True) if bit == "1"}
        joined: dict[str, Difference] = {}
        for difference in (_read(fields) for each in found for fields in each["found"]):
            known = joined.get(difference.name)
            joined[difference.name] = difference if known is None else known.joined(difference)
        ordered = dict.fromkeys([*outputs, *joined])
        # Every rank sees the same files, and the first one looks at what is in them besides tensors.
        num_unexpected = max((each["num_unexpected"] for each in found), default=0)
        of_files = [_read(fields) for each in found for fields in each["of_files"]]
        num_of_files = sum(each["num_of_files"] for each in found)
        return Verification(
            self.folder,
            len(outputs),
            self._plan.num_bytes,
            seconds,
            num_differing=len(differing) + num_unexpected + num_of_files,
            differences=[*(joined[name] for name in ordered if name in joined), *of_files][:_MAX_DIFFERENCES],
            num_files=next((each["num_files"] for each in found if each["num_files"] is not None), None),
        )

    def _compare_info(self, output: TensorInfo) -> None:
        """Compare what the folder says of a tensor; one that cannot be equal is not read."""
        spec = self._specs.get(output.name)
        if spec is None:
            self._add(Difference("missing", output.name, str(self.folder), expected=_describe(output)))
        elif (spec.shape, spec.dtype) != (output.shape, output.dtype):
            kind = "shape" if spec.shape != output.shape else "dtype"
            file, expected, found = self._file(output.name), _describe(output), _describe(spec)
            self._add(Difference(kind, output.name, file, expected, found))
            del self._specs[output.name]

    def _compare(self, spec: TensorSpec, first: int, expected: torch.Tensor) -> None:
        """Compare rows from `first` on with those that were written."""
        assert self._written is not None
        try:
            found = self._written.rows(spec, first, first + (expected.shape[0] if spec.shape else 1))
        except ExportError as error:
            self._add(Difference("unreadable", spec.name, self._file(spec.name), found=str(error)))
            return
        if not _are_equal(expected, found):
            self._add(_difference(spec, first, expected, found, self._file(spec.name)))

    def _file(self, name: str) -> str:
        assert self._written is not None
        return str(self._written.file_of(name))

    def _add(self, difference: Difference) -> None:
        with self._lock:
            known = self._differences.get(difference.name)
            self._differences[difference.name] = difference if known is None else known.joined(difference)


def _read(fields: dict[str, Any]) -> Difference:
    return Difference(**{**fields, "index": tuple(fields["index"])})


def _describe(info: TensorInfo) -> str:
    return f"{list(info.shape)} {dtype_name(info.dtype)}"


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: a NaN equals itself, a zero is not the negative one."""
    one, other = bytes_of(one), bytes_of(other)
    if not (one.storage_offset() % _WORD_BYTES or other.storage_offset() % _WORD_BYTES):
        # Six times as fast as byte by byte.
        whole = one.numel() // _WORD_BYTES * _WORD_BYTES
        if not torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64)):
            return False
        one, other = one[whole:], other[whole:]
    return torch.equal(one, other)


def _difference(info: TensorInfo, first_row: int, expected: torch.Tensor, found: torch.Tensor, file: str) -> Difference:
    """Tell how rows differ, block by block."""
    expected, found = expected.reshape(-1), found.reshape(-1)
    first, num_differing, largest = -1, 0, 0.0
    for begin, one, other in _blocks(expected, found):
        pair = (bytes_of(each).view(-1, info.dtype.itemsize) for each in (one, other))
        differs = torch.ne(*pair).any(dim=1)
        count = int(differs.sum())
        if count:
            first = begin + int(differs.to(torch.uint8).argmax()) if first < 0 else first
            num_differing += count
            largest = max(largest, _largest(one, other, differs))
    return Difference(
        "values",
        info.name,
        file,
        expected=_text(expected[first]),
        found=_text(found[first]),
        index=_index(info, first_row * math.prod(info.shape[1:]) + first),
        num_differing=num_differing,
        num_values=math.prod(info.shape),
        largest=largest,
    )


def _blocks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for begin in range(0, one.numel(), _BLOCK_ELEMENTS):
        yield begin, one[begin : begin + _BLOCK_ELEMENTS], other[begin : begin + _BLOCK_ELEMENTS]


def _largest(one: torch.Tensor, other: torch.Tensor, differs: torch.Tensor) -> float:
    """Return the largest absolute difference of values; infinite where one of them is no finite number."""
    try:
        apart = (one.to(torch.complex128) - other.to(torch.complex128))[differs].abs()
    except RuntimeError:  # of a dtype that cannot be converted
        return math.inf
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _text(value: torch.Tensor) -> str:
    try:
        return str(value.item())
    except RuntimeError:  # of a dtype whose elements are several numbers
        return f"0x{bytes(bytes_of(value).tolist()).hex()}"


def _index(info: TensorInfo, position: int) -> tuple[int, ...]:
    index = []
    for size in reversed(info.shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))


def _drop_pages(file: Path) -> None:
    """Ask the kernel to forget what it keeps of a file, so that the disk is read; it may decline."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
