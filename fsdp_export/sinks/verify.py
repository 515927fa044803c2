"""Compares a folder with the source that it was written from, as the disk has it, and with the record of its export."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import ComparisonError, ExportError
from ..plan import Plan
from ..spec import TensorInfo
from ..verification import Difference, Verification
from .compare import MAX_DIFFERENCES, CompareSink, Other, difference_from
from .compare_files import FileComparison, compare_files

__all__ = ["VerifySink"]


class VerifySink(CompareSink):
    """Compares every piece with what was written of it. What cannot be read back is a difference too.

    Args:
        folder: What was written.
        open_written: Opens it; called on every rank.
    """

    def __init__(self, folder: Path, open_written: Callable[[], Other]) -> None:
        super().__init__(folder, lambda: _opened(open_written))
        self._of_files: FileComparison | None = None

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Open the folder and compare names, shapes, dtypes and, on the first rank, its other files; see `Sink.open`.

        Raises:
            ComparisonError: It cannot be read, or its files do not fit together.
        """
        super().open(plan, rank, ticket)
        assert self._other is not None
        files = {self._other.file_of(spec.name) for spec in self._other.specs if spec.num_bytes}
        for file in files:
            _drop_pages(file)
        if rank == plan.ranks[0]:
            self._of_files = compare_files(self.folder, files, are_equal=not self._differences)

    def card(self) -> str:
        """Return what this rank found, for `verification`; empty if all was equal and it looked at tensors alone."""
        if not self._differences and self._of_files is None:
            return ""
        facts: dict[str, Any] = {"tensors": self.facts(), "num_files": None, "num_of_files": 0, "of_files": []}
        if self._of_files is not None:
            of_files = list(map(asdict, self._of_files.differences))
            facts["num_files"], facts["num_of_files"] = self._of_files.num_files, len(of_files)
            facts["of_files"] = of_files[:MAX_DIFFERENCES]
        return json.dumps(facts)

    def verification(self, cards: Sequence[str], seconds: float, source: Path | None = None) -> Verification:
        """Join what all ranks found; see `comparison`."""
        assert self._plan is not None
        facts = [json.loads(card) for card in cards if card]
        found = self.joined([each["tensors"] for each in facts])
        of_files = [difference_from(fields) for each in facts for fields in each["of_files"]]
        return Verification(
            self.folder,
            len(self._plan.outputs),
            self._plan.num_bytes,
            seconds,
            found.num_differing + sum(each["num_of_files"] for each in facts),
            [*found.first, *of_files][:MAX_DIFFERENCES],
            source=source,
            largest=found.largest,
            num_files=next((each["num_files"] for each in facts if each["num_files"] is not None), None),
        )

    def _read(self, spec: TensorInfo, first: int, stop: int) -> torch.Tensor | None:
        try:
            return super()._read(spec, first, stop)
        except ExportError as error:
            self._add(Difference("unreadable", spec.name, self._file(spec.name), found=str(error)))
            return None


def _opened(open_written: Callable[[], Other]) -> Other:
    try:
        return open_written()
    except ExportError as error:
        raise ComparisonError(f"what was written cannot be read back: {error}") from error


def _drop_pages(file: Path) -> None:
    """Ask the kernel to forget what it keeps of a file, so that the disk is read; it may decline."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
