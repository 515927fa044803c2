"""What came of comparing tensors with others, or with the source they were written from: in words, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ComparisonError, printable
from .table import counted, human_bytes

__all__ = ["Comparison", "Difference", "Verification"]

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
    """How a tensor differs from the one that was expected, or a file from the record of the export.

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
class Comparison:
    """What came of comparing a checkpoint with the one that it should equal; the same on every rank.

    Attributes:
        path: The checkpoint.
        num_tensors: Number of tensors of the one that it should equal.
        num_bytes: Their bytes.
        seconds: How long it took.
        num_differing: Number of tensors, and of files, that differ, are missing or are unexpected.
        differences: How they do, of the first 20 in the order of the checkpoint. A tensor of another dtype may be there
            twice: for its dtype, and for its values.
        source: The checkpoint that it should equal.
        num_tied: Number of further names of tied tensors, which either of the two may have or lack.
        largest: The largest absolute difference of two values; infinite where one of them is no finite number.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    seconds: float
    num_differing: int = 0
    differences: Sequence[Difference] = ()
    source: Path | None = None
    num_tied: int = 0
    largest: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether both have the same names, and the same shape, dtype and bytes for each."""
        return not self.num_differing

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return a line per difference, or one that says that there is none."""
        if self.is_equal:
            return [f"compared {self._amount()}: all equal{self._tied()}"]
        return [*map(str, self.differences), *self._more()]

    def error(self) -> ComparisonError | None:
        """Return what to raise; None if all is equal."""
        if self.is_equal:
            return None
        fix = "Give the dtype that one was cast to (--dtype, dtype=) to compare them after that cast"
        return ComparisonError(
            f"two checkpoints differ: {self.path} is not {self.source}",
            expected=f"{self.num_tensors:,} equal tensors{self._tied()}",
            found=self._names() + self._apart(),
            fix=fix if any(difference.kind == "dtype" for difference in self.differences) else None,
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
            "tied": self.num_tied,
            "largest": self.largest if math.isfinite(self.largest) else None,
            "num_differing": self.num_differing,
            "differences": [difference.as_json() for difference in self.differences],
        }

    def _amount(self) -> str:
        return f"{counted(self.num_tensors, 'tensor')}, {human_bytes(self.num_bytes)}"

    def _tied(self) -> str:
        return f", and {counted(self.num_tied, 'tied name')}" if self.num_tied else ""

    def _apart(self) -> str:
        return f"; values at most {self.largest:.6g} apart" if 0 < self.largest < math.inf else ""

    def _differing(self) -> list[str]:
        return list(dict.fromkeys(difference.name for difference in self.differences))

    def _more(self) -> list[str]:
        more = self.num_differing - len(self._differing())
        return [f"and {more:,} more"] if more else []

    def _names(self) -> str:
        names = [printable(name) for name in self._differing()[:_MAX_NAMES]]
        more = self.num_differing - len(names)
        return f"{self.num_differing:,} that differ: {', '.join(names)}" + (f" and {more:,} more" if more else "")


@dataclass(frozen=True)
class Verification(Comparison):
    """What came of comparing a folder with the source it was written from; the same on every rank.

    Attributes:
        failure: Why the folder could not be read back at all.
        num_files: Number of other files that were compared with the record of the export; None without a record.
    """

    failure: str | None = None
    num_files: int | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every tensor is there and has the bytes of its source, and every other file is as it was written."""
        return not self.num_differing and self.failure is None

    def lines(self) -> list[str]:
        """Return a line per difference, or one that says that there is none."""
        return [f"verified {self._amount()}: all equal{self._other_files()}"] if self.is_equal else super().lines()

    def error(self) -> ComparisonError | None:
        """Return what to raise; None if all is equal."""
        if self.is_equal:
            return None
        if self.failure is not None:
            return ComparisonError(self.failure)
        files = counted(self.num_files or 0, "other file")
        return ComparisonError(
            "what was written differs from its source",
            file=self.path,
            expected=f"{self.num_tensors:,} equal tensors" + (f" and {files}" if self.num_files else ""),
            found=self._names(),
            fix="Export again; if it differs again, suspect the disk or the memory of this machine",
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        facts = super().as_json()
        return {
            **{key: facts[key] for key in ("equal", "tensors", "bytes", "seconds", "error")},
            "files": self.num_files,
            **{key: facts[key] for key in ("num_differing", "differences")},
        }

    def _other_files(self) -> str:
        if self.num_files is None:
            return "; no record tells of other files"
        return f", and {counted(self.num_files, 'other file')} as written" if self.num_files else ""
