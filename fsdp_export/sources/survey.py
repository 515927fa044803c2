"""What lies in a folder and below it: the checkpoints, which of them is the newest, and what else there is."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ..paths import is_folder, read_file
from .dcp_metadata import METADATA

__all__ = ["MAX_DEPTH", "Survey", "entries", "numbers_of"]

MAX_DEPTH = 4
"""How many levels below a folder checkpoints are looked for."""

_log = logging.getLogger("fsdp_export")

_MAX_FOLDERS = 20_000
_MAX_DIGITS = 18
_MAX_LINE_BYTES = 4096
# Of verl and Megatron, and of SkyRL: the step, in digits.
_STEP_FILES = frozenset({"latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt"})
_LATEST = frozenset({"LATEST", "latest", "LATEST.txt", "latest.txt"})

_NUMBER = re.compile(
    r"(?:^|[-_.])(epoch|ep|global_step|step|checkpoint|ckpt|iteration|iter|batch|ba)[-_=]?(\d{1,18})(?=$|[-_.])"
)
_EPOCH_WORDS = frozenset({"epoch", "ep"})
_OPTIMIZER_FOLDER = re.compile(r"optim(izer)?s?([-_].*)?")
# Models that are trained together and saved side by side, so that the newest is no more meant than the others.
_ROLES = frozenset({"actor", "critic", "policy", "value", "ref", "reference", "reward", "teacher", "student", "draft"})


@dataclass(frozen=True, slots=True)
class _Step:
    """What was saved at once: a folder, and the checkpoints of models in it or the folder itself."""

    folder: Path
    number: tuple[int, int] | None
    checkpoints: list[Path] = field(default_factory=list)


class Survey:
    """What lies in a folder and up to four levels below it.

    Args:
        root: The folder.
        counts: Tells from the names of a folder's files whether it is a checkpoint, or a part of one. Folders in a
            checkpoint are not looked into.

    Attributes:
        checkpoints: The folders that are, the root among them if it is.
        others: Files of all other folders.
        was_cut_short: Whether there are more folders than were looked into.
    """

    def __init__(self, root: Path, counts: Callable[[Collection[str]], bool]) -> None:
        self.root = root
        self.checkpoints: list[Path] = []
        self.others: list[Path] = []
        self._counts = counts
        self._latest: set[Path] = set()
        self._num_folders = 0
        self._seen: set[str] = set()
        level = [root]
        for _ in range(MAX_DEPTH + 1):
            level = [inner for folder in level for inner in self._look_into(folder)]
        self.was_cut_short = self._num_folders >= _MAX_FOLDERS

    def newest_first(self) -> Iterator[list[Path]]:
        """Yield the checkpoints of models, those that are equally new together."""
        steps: dict[Path, _Step] = {}
        for checkpoint in self._of_models():
            step = _step_of(self.root, checkpoint)
            steps.setdefault(step.folder, step).checkpoints.append(checkpoint)
        are_numbered = all(step.number for step in steps.values())

        def age(step: _Step) -> tuple[bool, tuple[int, int] | float]:
            is_latest = not self._latest.isdisjoint((step.folder, *step.folder.parents))
            return is_latest, (step.number or (0, 0)) if are_numbered else max(map(_saved_at, step.checkpoints))

        for _, equals in groupby(sorted(steps.values(), key=age, reverse=True), key=age):
            yield [checkpoint for step in equals for checkpoint in step.checkpoints]

    @property
    def num_models(self) -> int:
        """Number of checkpoints of models."""
        return len(self._of_models())

    def _of_models(self) -> list[Path]:
        return [
            checkpoint
            for checkpoint in self.checkpoints
            if not any(map(_OPTIMIZER_FOLDER.fullmatch, checkpoint.relative_to(self.root).parts))
        ]

    def _look_into(self, folder: Path) -> list[Path]:
        """Note what a folder is, and return the folders in it that are still to be looked into."""
        # Links may lead round in circles.
        try:
            real_path = os.path.realpath(folder)
        except OSError:  # it went away meanwhile
            return []
        if real_path in self._seen or self._num_folders >= _MAX_FOLDERS:
            return []
        self._seen.add(real_path)
        self._num_folders += 1
        found = entries(folder)
        folders = [folder / entry.name for entry in found if is_folder(entry)]
        files = [entry.name for entry in found if not is_folder(entry)]
        if self._counts(files):
            self.checkpoints.append(folder)
            return []
        self.others += [folder / name for name in files]
        self._note_latest(folder, folders, files)
        return [inner for inner in folders if not inner.name.startswith(".") and inner.name != "__pycache__"]

    def _note_latest(self, folder: Path, folders: Sequence[Path], files: Sequence[str]) -> None:
        """Read what a trainer wrote down as its latest step."""
        named: dict[str, list[Path]] = {}
        for file in _STEP_FILES.intersection(files):
            text = _first_line(folder / file)
            number = _as_number(text)
            named[text] = [step for step in folders if number is not None and _number_of(step.name)[1] == number]
        for file in _LATEST.intersection(files):
            text = _first_line(folder / file)
            named[text] = [step for step in folders if step.name == Path(text).name]
        for link in folders:
            if link.name in _LATEST:
                real_path = os.path.realpath(link)
                named[link.name] = [step for step in folders if os.path.realpath(step) == real_path]
        for text, steps in named.items():
            self._latest.update(steps)
            if not steps:
                _log.warning("the latest step of %s is said to be %r, which is not there", folder, text)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder, links last; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: (entry.is_symlink(), entry.name))
    except OSError:
        return []


def numbers_of(folder: Path) -> dict[str, int]:
    """Return the epoch and the step that a checkpoint's folder is named after, or one of the two above it."""
    folder = folder.absolute()
    for place in (folder, *folder.parents[:2]):
        numbers = zip(("epoch", "step"), _number_of(place.name), strict=True)
        # Above, a number alone may be a year or anything.
        if place == folder or _as_number(place.name) is None:
            found = {word: number for word, number in numbers if number >= 0}
            if found:
                return found
    return {}


def _first_line(file: Path) -> str:
    try:
        return read_file(file).partition(b"\n")[0][:_MAX_LINE_BYTES].decode(errors="replace").strip()
    except OSError:
        return ""


def _saved_at(checkpoint: Path) -> float:
    """Return when a checkpoint was complete: when its metadata were written, or else its last file."""
    files = entries(checkpoint)
    times = [0.0]
    for entry in [entry for entry in files if entry.name == METADATA] or files:
        try:
            times.append(entry.stat().st_mtime if entry.is_file() else 0.0)
        except OSError:
            continue
    return max(times)


def _step_of(root: Path, checkpoint: Path) -> _Step:
    """Return the step that a checkpoint is of, with the epoch and step in the names of folders below the root."""
    parts = checkpoint.relative_to(root).parts
    epoch = step = -1
    depth = len(parts) - (parts[-1] in _ROLES)
    for index, part in enumerate(parts):
        numbers = _number_of(part)
        if max(numbers) >= 0:
            epoch, step, depth = max(epoch, numbers[0]), max(step, numbers[1]), index + 1
    return _Step(root.joinpath(*parts[:depth]), (epoch, step) if max(epoch, step) >= 0 else None)


def _number_of(name: str) -> tuple[int, int]:
    """Return the epoch and the step in a folder's name, -1 for what it does not name."""
    number = _as_number(name)
    if number is not None:
        return -1, number
    numbers = {word in _EPOCH_WORDS: int(number) for word, number in _NUMBER.findall(name)}
    return numbers.get(True, -1), numbers.get(False, -1)


def _as_number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None
