"""From the folder a user names, or stands in, to the checkpoint that is meant."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from ..errors import NotFoundError, SourceError, UnsafeInputError, UsageError, listing
from .base import Source
from .dcp import DcpSource, is_dcp_folder, open_metadata
from .dcp_metadata import METADATA

__all__ = ["find_checkpoint", "open_source"]

_log = logging.getLogger("fsdp_export")

_MAX_DEPTH = 4
_MAX_FOLDERS = 20_000
_ITERATION_FILE = "latest_checkpointed_iteration.txt"
_LATEST = frozenset({"LATEST", "latest"})

_NUMBER = re.compile(
    r"(?:^|[-_.])(epoch|ep|global_step|step|checkpoint|ckpt|iteration|iter|batch|ba)[-_=]?(\d+)(?=$|[-_.])"
)
_EPOCH_WORDS = frozenset({"epoch", "ep"})
_OPTIMIZER_FOLDER = re.compile(r"optim(izer)?s?([-_].*)?")
# Models that are trained together and saved side by side, so that the newest is no more meant than the others.
_ROLES = frozenset({"actor", "critic", "policy", "value", "ref", "reference", "reward", "teacher", "student", "draft"})

_WAY_OUT = "Name the folder of a checkpoint, or make one to try with: fsdp-export --demo --out ckpt/"
_OTHER_LAYOUTS = (
    (re.compile(r"model_world_size_\d+_rank_\d+\.pt"), "rank files of verl"),
    (re.compile(r"pytorch_model_fsdp(_\d+)?_rank\d+\.bin"), "rank files of accelerate"),
    (re.compile(r"pytorch_model_fsdp(_\d+)?\.bin"), "a full state dict of accelerate"),
    (re.compile(r".*[-_.]rank[-_]?\d+\.pth?"), "rank files"),
    (re.compile(r"(zero_pp_rank|mp_rank|bf16_zero_pp_rank)_.*\.pt"), "a checkpoint of DeepSpeed"),
    (re.compile(r".*\.safetensors(-\d+-of-\d+\.safetensors)?"), "safetensors"),
    (re.compile(r".*\.(bin|pth?|ckpt)"), "a file of torch.save"),
)


def open_source(
    path: Path,
    *,
    prefix: str | None = None,
    ranks: tuple[int, ...] = (0,),
    rank: int = 0,
    device: torch.device | None = None,
) -> Source:
    """Find a checkpoint and open it.

    Args:
        path: A checkpoint's folder, or one above it.
        prefix: What the model's names begin with in it; None to find out.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Raises:
        NotFoundError: There is no checkpoint, or no model in it.
        UsageError: Several checkpoints, or several prefixes, could be meant.
        SourceError: The checkpoint cannot be read.
    """
    return DcpSource(find_checkpoint(path), prefix=prefix, ranks=ranks, rank=rank, device=device)


def find_checkpoint(path: Path) -> Path:
    """Return the folder itself if it is a checkpoint, else the newest complete one at most four levels below it.

    What a trainer wrote into `latest_checkpointed_iteration.txt` or `LATEST` beside its steps counts first, then the
    epoch and step in the names of folders, and where names have none, the time. A newer step that is incomplete is
    skipped with a warning. Optimizers, which some trainers save beside the model, do not count.

    Raises:
        NotFoundError: There is none.
        UsageError: Several could be meant.
        SourceError: There are some, but none is complete; the newest one's error.
    """
    if path.name == METADATA and path.is_file():
        path = path.parent
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise NotFoundError(f"{path} {what}", fix=_WAY_OUT)
    survey = _Survey(path)
    if path in survey.checkpoints:
        return path
    errors: list[SourceError] = []
    for folders in survey.newest_first():
        complete = [folder for folder in folders if _is_complete(folder, errors)]
        if len(complete) > 1:
            found = listing(folder.relative_to(path) for folder in complete)
            raise UsageError("several checkpoints that could be meant", file=path, found=found, fix="Name one of them")
        if complete:
            return complete[0]
    raise errors[0] if errors else survey.nothing_found()


def _is_complete(folder: Path, errors: list[SourceError]) -> bool:
    try:
        open_metadata(folder)
    except UnsafeInputError:
        raise
    except SourceError as error:
        errors.append(error)
        _log.warning("an incomplete checkpoint is skipped: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Step:
    """What was saved at once: a folder, and the checkpoints of models in it or the folder itself."""

    folder: Path
    number: tuple[int, int] | None
    checkpoints: list[Path] = field(default_factory=list)


class _Survey:
    """What lies in a folder and up to four levels below it.

    Attributes:
        checkpoints: Folders of DCP checkpoints, or of parts of one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints: list[Path] = []
        self._latest: set[Path] = set()
        self._other_layouts: dict[str, Path] = {}
        self._num_folders = 0
        self._seen: set[str] = set()
        level = [root]
        for _ in range(_MAX_DEPTH + 1):
            level = [inner for folder in level for inner in self._look_into(folder)]

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

    def nothing_found(self) -> NotFoundError:
        """Return the error that says what was looked for, and what was there instead."""
        if self.checkpoints:
            found = listing(checkpoint.relative_to(self.root) for checkpoint in self.checkpoints)
            return NotFoundError("only optimizer state", file=self.root, found=found, fix=_WAY_OUT)
        others = [f"{kind} ({path.relative_to(self.root)}), not read yet" for kind, path in self._other_layouts.items()]
        found = listing(others or [entry.name for entry in _entries(self.root)]) or "nothing"
        if self._num_folders >= _MAX_FOLDERS:
            found += f", in the first {_MAX_FOLDERS:,} folders"
        expected = f"{METADATA} and *.distcp files there or up to {_MAX_DEPTH} levels below"
        return NotFoundError("no sharded checkpoint", file=self.root, expected=expected, found=found, fix=_WAY_OUT)

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
        entries = _entries(folder)
        folders = [folder / entry.name for entry in entries if _is_folder(entry)]
        files = [entry.name for entry in entries if not _is_folder(entry)]
        if is_dcp_folder(files):
            self.checkpoints.append(folder)
            return []
        self._note_latest(folder, folders, files)
        for name in files:
            kind = next((kind for pattern, kind in _OTHER_LAYOUTS if pattern.fullmatch(name)), None)
            if kind is not None:
                self._other_layouts.setdefault(kind, folder / name)
        return [inner for inner in folders if not inner.name.startswith(".") and inner.name != "__pycache__"]

    def _note_latest(self, folder: Path, folders: Sequence[Path], files: Sequence[str]) -> None:
        """Read what a trainer wrote down as its latest step."""
        named: dict[str, list[Path]] = {}
        if _ITERATION_FILE in files:
            text = _first_line(folder / _ITERATION_FILE)
            named[text] = [step for step in folders if text.isdecimal() and _number_of(step.name)[1] == int(text)]
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


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _first_line(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.readline(4096).decode(errors="replace").strip()
    except OSError:
        return ""


def _saved_at(checkpoint: Path) -> float:
    try:
        return (checkpoint / METADATA).stat().st_mtime
    except OSError:
        return 0.0


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
    if name.isdecimal():
        return -1, int(name)
    numbers = {word in _EPOCH_WORDS: int(number) for word, number in _NUMBER.findall(name)}
    return numbers.get(True, -1), numbers.get(False, -1)
