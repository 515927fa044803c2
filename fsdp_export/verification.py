"""What came of comparing written tensors with their source, in words and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ComparisonError
from .table import counted, human_bytes

__all__ = ["Difference", "Verification"]

_MAX_NAMES = 5
_WHATS = {
    "missing": "no tensor",
    "unexpected": "an unexpected tensor",
    "shape": "another shape",
    "dtype": "another dtype",
    "unreadable": "bytes that cannot be read back",
}
_OF_FILES = {
    "gone": "a file of the export that is gone",
    "size": "a file of another size than was written",
    "content": "a file that is not what was written",
    "metadata": "a file whose __metadata__ is not that of torch's tensors",
    "unrecorded": "weights that the export did not write",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor that was written differs from its source, or a file from the record of the export.

    Attributes:
        kind: Of a tensor `"missing"`, `"unexpected"`, `"shape"`, `"dtype"`, `"unreadable"` or `"values"`; of a file
            `"gone"`, `"size"`, `"content"`, `"metadata"` or `"unrecorded"`.
        name: The name of the tensor, or of the file.
        file: The file that has it, or the folder.
        expected: What should be there: shape and dtype, the first value that differs, or a digest.
        found: What is there.
        index: Where the first value that differs stands.
        num_differing: Number of values whose bytes differ.
        num_values: Number of values of the tensor.
        largest: The largest absolute difference of two values; infinite where one of them is no finite number.
    """

    kind: str
    name: str
    file: str
    expected: str | None = None
    found: str | None = None
    index: tuple[int, ...] = ()
    num_differing: int = 0
    num_values: int = 0
    largest: float = 0.0

    @property
    def is_of_file(self) -> bool:
        """Whether it is about a file and not about a tensor."""
        return self.kind in _OF_FILES

    def __str__(self) -> str:
        if self.is_of_file:
            what = _OF_FILES[self.kind]
            return str(ComparisonError(what, file=self.file, expected=self.expected, found=self.found))
        what = _WHATS.get(self.kind, f"{self.num_differing:,} of {self.num_values:,} values differ")
        expected, found = self.expected, self.found
        if self.kind == "values":
            expected = f"{expected} at {list(self.index)}"
            found = f"{found}, at most {self.largest:.6g} apart" if math.isfinite(self.largest) else found
        return str(ComparisonError(what, name=self.name, file=self.file, expected=expected, found=found))

    def joined(self, other: Difference) -> Difference:
        """Return what two pieces of a tensor, or two ranks, say together."""
        if self.kind != "values" or other.kind != "values":
            return other if self.kind == "values" else self
        first = min(self, other, key=lambda difference: difference.index)
        num_differing = self.num_differing + other.num_differing
        return replace(first, num_differing=num_differing, largest=max(self.largest, other.largest))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        facts = {key: value for key, value in asdict(self).items() if value is not None}
        if self.kind != "values":
            return {key: facts[key] for key in ("kind", "name", "file", "expected", "found") if key in facts}
        return {**facts, "index": list(self.index), "largest": self.largest if math.isfinite(self.largest) else None}


@dataclass(frozen=True)
class Verification:
    """What came of comparing a folder with the source it was written from; the same on every rank.

    Attributes:
        path: The folder.
        num_tensors: Number of tensors of the source.
        num_bytes: Their bytes.
        seconds: How long it took.
        num_differing: Number of tensors and files that differ, are missing or are unexpected.
        differences: The first of them, in the order of the export, at most 20.
        failure: Why the folder could not be read back at all.
        num_files: Number of other files that were compared with the record of the export; None without a record.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    seconds: float
    num_differing: int = 0
    differences: Sequence[Difference] = ()
    failure: str | None = None
    num_files: int | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every tensor is there and has the bytes of its source, and every other file is as it was written."""
        return not self.num_differing and self.failure is None

    def lines(self) -> list[str]:
        """Return a line per difference, or one that says that there is none."""
        if self.is_equal:
            tensors = counted(self.num_tensors, "tensor")
            return [f"verified {tensors}, {human_bytes(self.num_bytes)}: all equal{self._other_files()}"]
        more = self.num_differing - len(self.differences)
        return [*map(str, self.differences), *([f"and {more:,} more"] if more else [])]

    def _other_files(self) -> str:
        if self.num_files is None:
            return "; no record tells of other files"
        return f", and {counted(self.num_files, 'other file')} as written" if self.num_files else ""

    def error(self) -> ComparisonError | None:
        """Return what to raise; None if all is equal."""
        if self.is_equal:
            return None
        if self.failure is not None:
            return ComparisonError(self.failure)
        files = counted(self.num_files or 0, "other file")
        names = [difference.name for difference in self.differences[:_MAX_NAMES]]
        more = self.num_differing - len(names)
        return ComparisonError(
            "what was written differs from its source",
            file=self.path,
            expected=f"{self.num_tensors:,} equal tensors" + (f" and {files}" if self.num_files else ""),
            found=f"{self.num_differing:,} that differ: {', '.join(names)}" + (f" and {more:,} more" if more else ""),
            fix="Export again; if it differs again, suspect the disk or the memory of this machine",
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        error = self.error()
        return {
            "equal": self.is_equal,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "error": None if error is None else str(error),
            "files": self.num_files,
            "num_differing": self.num_differing,
            "differences": [difference.as_json() for difference in self.differences],
        }
