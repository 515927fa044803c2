"""One file of `torch.save` for every rank, each with the DTensors of its state dict: what verl and accelerate write.

`torch.load` needs the torch that wrote them, a process group or its stand-in, and the whole model in memory. Here the
pickles are only read for where every block lies, and rows are put together from the blocks when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import NotFoundError, SourceError, UsageError, listing
from ..paths import is_file
from ..table import counted, rank_ranges
from .archive import DataFiles
from .dcp_model import find_model
from .rank_tensors import RankTensors
from .state_file import StateFile, locator
from .stored import StoredSource

__all__ = ["RankFilesSource", "recognizes"]

_VERL = re.compile(r"(model_world_size_([1-9]\d{0,4}))_rank_(\d{1,5})\.pt")
_ACCELERATE = re.compile(r"(pytorch_model_fsdp(?:_(\d{1,6}))?)_rank(\d{1,5})\.bin")


@dataclass(slots=True)
class _Set:
    """The files of one save.

    Attributes:
        maker: What writes files with such names.
        stem: What their names begin with.
        world_size: How many ranks there were; None where the names do not say.
        files: The files by their ranks.
    """

    maker: str
    stem: str
    world_size: int | None
    files: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.stem} ({counted(len(self.files), 'file')})"


class RankFilesSource(StoredSource):
    """The model in rank files. Every rank can read all of it; of the values only copies are compared before.

    Args:
        path: The folder with the files, or one of them where the folder has those of several saves.
        prefix: What the model's keys begin with; None to find out.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Attributes:
        skipped: Keys that are not exported, and files of other models.

    Raises:
        NotFoundError: There are no rank files, or no tensor of a model in them.
        UsageError: Several saves, or several prefixes, could be meant.
        SourceError: Files are missing, damaged, of different saves, or of a layout that is not read.
        UnsafeInputError: A pickle names what no state dict needs.
    """

    def __init__(
        self,
        path: Path,
        *,
        prefix: str | None = None,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        folder, file_name = (path.parent, path.name) if is_file(path) else (path, None)
        chosen, others = _choose(folder, file_name)
        files = DataFiles(folder)
        tensors = RankTensors(files)
        for saver, file in sorted(chosen.files.items()):
            tensors.add(StateFile(files, file), saver)
        model = find_model(tensors, prefix)
        num_missing = _check_complete(folder, chosen, tensors, list(model.keys.values()))
        stored = {name: tensors.stored(key) for name, key in model.keys.items()}
        super().__init__(folder, files, stored, locator(files), ranks=ranks, rank=rank, device=device)
        exported = set(model.keys.values())
        left_out = [key for key in (*tensors.tensors, *tensors.others) if key not in exported]
        self.skipped = (*left_out, *(file for other in others for file in other.files.values()))
        world_size = chosen.world_size or len(chosen.files) + num_missing
        found = f"{chosen.maker} rank files, world size {world_size:,}"
        remark = f"read from {len(chosen.files):,} files, of which the missing ones are replicas" if num_missing else ""
        self.description = self.describe(found, tensors.mesh, prefix=model.prefix, remark=remark)


def recognizes(file_names: Iterable[str]) -> bool:
    """Tell from the names of a folder's files whether it has rank files."""
    return any(_VERL.fullmatch(name) or _ACCELERATE.fullmatch(name) for name in file_names)


def _choose(folder: Path, file_name: str | None) -> tuple[_Set, list[_Set]]:
    """Return the save that is meant, and those of other models beside it."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        fix = "Name the folder that has them"
        raise NotFoundError("no rank files", file=folder, found=error.strerror or error, fix=fix) from error
    sets: dict[str, _Set] = {}
    for name in names:
        if match := _VERL.fullmatch(name):
            found = sets.setdefault(match[1], _Set("verl", match[1], int(match[2])))
            found.files[int(match[3])] = name
        elif match := _ACCELERATE.fullmatch(name):
            found = sets.setdefault(match[1], _Set("accelerate", match[1], None))
            found.files[int(match[3])] = name
    if file_name is not None:
        named = [found for found in sets.values() if file_name in found.files.values()]
    else:
        # accelerate numbers the models that are trained together, the first one 0.
        numbered = sorted((found for found in sets.values() if found.world_size is None), key=_model_number)
        named = [found for found in sets.values() if found.world_size is not None] + numbered[:1]
    if not named:
        expected = "model_world_size_{W}_rank_{r}.pt or pytorch_model_fsdp_0_rank{r}.bin"
        found_names = listing(names) or "nothing"
        fix = "Name the folder that has them"
        raise NotFoundError("no rank files", file=folder, expected=expected, found=found_names, fix=fix)
    if len(named) > 1:
        fix = "Name a file of the one that is meant"
        raise UsageError("rank files of several saves", file=folder, found=listing(named), fix=fix)
    return named[0], [found for found in sets.values() if found is not named[0]]


def _model_number(found: _Set) -> int:
    match = _ACCELERATE.fullmatch(next(iter(found.files.values())))
    return int(match[2] or 0) if match else 0


def _check_complete(folder: Path, chosen: _Set, tensors: RankTensors, keys: Sequence[str]) -> int:
    """Refuse files without which some block of a tensor is nowhere; return how many others are missing."""
    expected = set(range(chosen.world_size or 0)) | tensors.ranks | set(range(max(chosen.files)))
    missing = sorted(expected - chosen.files.keys())
    holes = ((key, ranks) for key in keys if (ranks := tensors.holes(key)))
    hole = next(holes, None)
    # Without DTensors nothing tells whether the other files have the same.
    if missing and (hole or not tensors.mesh):
        verb = "is" if len(missing) == 1 else "are"
        found = f"{len(chosen.files):,} of {len(expected):,} ({rank_ranges(missing)} {verb} missing)"
        fix = "Node-local disks are the usual cause: copy the others here"
        raise SourceError("missing rank files", file=folder, found=found, fix=fix)
    if hole:
        key, ranks = hole
        fix = "The files are of different saves; use another step"
        found = f"no block of {rank_ranges(ranks)}"
        raise SourceError("blocks that no file has", name=key, file=folder, found=found, fix=fix)
    return len(missing)
