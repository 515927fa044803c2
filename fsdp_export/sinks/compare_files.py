"""Compares the files of a folder with the record of the export that wrote them: what tensors do not tell."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..paths import is_file
from ..publish import MARKER, foreign_weights
from ..record import RecordedFile, recorded_files
from ..verification import Difference

__all__ = ["FileComparison", "compare_files"]

_CHUNK_BYTES = 1 << 20
_SHOWN_DIGITS = 16
_FORMAT = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class FileComparison:
    """What came of comparing the files of a folder with its record.

    Attributes:
        differences: What differs.
        num_files: Number of files besides the weights that the record names; None if there is no record.
    """

    differences: list[Difference]
    num_files: int | None


def compare_files(folder: Path, weights: Collection[Path], *, are_equal: bool) -> FileComparison:
    """Compare the files of a folder with its record: which there are, their sizes, and the digests of all but weights.

    Weights must say of themselves that they are torch's, which some loaders insist on. Without a record nothing is
    compared: others write what they like.

    Args:
        folder: The folder.
        weights: The files of weights that were opened.
        are_equal: Whether all names, shapes and dtypes are; then the sizes of weights count too.
    """
    recorded = recorded_files(folder)
    if recorded is None:
        lost = Difference("content", MARKER, str(folder / MARKER), "a record of an export")
        return FileComparison([lost] if os.path.lexists(folder / MARKER) else [], None)
    differences = list(_unlike_torch(weights))
    of_weights = {name for name in recorded if name.endswith(".safetensors")}
    for name, expected in sorted(recorded.items()):
        if name not in of_weights or are_equal or not is_file(folder / name):
            differences += _changes(folder, name, expected)
    foreign = sorted(foreign_weights(folder))
    differences += [Difference("unrecorded", name, str(folder / name)) for name in foreign]
    return FileComparison(differences, len(recorded) - len(of_weights))


def _changes(folder: Path, name: str, expected: RecordedFile) -> Iterator[Difference]:
    path = folder / name
    if not is_file(path):
        yield Difference("gone", name, str(path), expected=f"a file, as {MARKER} has it")
        return
    try:
        num_bytes = path.stat().st_size
        if expected.num_bytes is not None and num_bytes != expected.num_bytes:
            yield Difference("size", name, str(path), f"{expected.num_bytes:,} bytes", f"{num_bytes:,} bytes")
        elif expected.sha256 is not None and (found := _sha256(path)) != expected.sha256:
            digests = [f"sha256 {digest[:_SHOWN_DIGITS]}..." for digest in (expected.sha256, found)]
            yield Difference("content", name, str(path), digests[0], digests[1])
    except OSError as error:
        yield Difference("content", name, str(path), found=error.strerror or str(error))


def _unlike_torch(weights: Iterable[Path]) -> Iterator[Difference]:
    for path in sorted(weights):
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
        except (OSError, SafetensorError) as error:
            yield Difference("metadata", path.name, str(path), str(_FORMAT), str(error))
            continue
        if (metadata or {}).get("format") != "pt":
            yield Difference("metadata", path.name, str(path), str(_FORMAT), str(metadata or "none"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
