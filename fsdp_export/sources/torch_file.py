"""A full state dict in a file of `torch.save`, or in several with an index. It may lie beside other state."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import NotFoundError, SourceError, UsageError, listing
from ..paths import is_file, is_folder
from ..spec import Box
from .archive import DataFiles
from .dcp_model import find_model
from .dtensor_pickle import DTensor, Meshes, sharding_of
from .hf_files import read_index
from .state_file import StateFile, locator
from .stored import Chunk, StoredSource, StoredTensor
from .tensor_pickle import TensorView

__all__ = ["TorchFileSource", "holds_model", "recognizes"]

_STATE_FILE = re.compile(r".+\.(bin|pt|pth|ckpt)")
_INDEX = re.compile(r".+\.(bin|pt|pth)\.index\.json")
# In the order in which they are taken: what transformers and accelerate call a whole model.
_KNOWN = ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_OTHER_STATE = re.compile(
    r"(optim|scheduler|lr_scheduler|scaler|rng_state|random_states|training_args|trainer_state|extra_state|data|sampler"
    r"|custom_checkpoint|adapter_model|meta\.pt|train_state|.*[-_.]rank[-_]?\d+|.*mp_rank_\d+).*"
)
_LIGHTNING = "pytorch-lightning_version"
_NAME_IT = "Name the file that has it"


@dataclass(slots=True)
class _Entries:
    """What all the files hold together, for `find_model`."""

    file: Path
    tensors: list[str]
    paths: dict[str, tuple[str, ...]]


class TorchFileSource(StoredSource):
    """A full state dict that `torch.save` wrote. Every rank can read all of it; no value is read before `rows`.

    Args:
        path: The file, the index of several, or a folder with one or the other.
        prefix: What the model's keys begin with; None to find out.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Attributes:
        skipped: Keys that are not exported: optimizer, counters, what is no tensor.

    Raises:
        NotFoundError: There is no such file, or no tensor of a model in it.
        UsageError: Several files, or several prefixes, could be meant.
        SourceError: Files are missing, damaged, or of a layout that is not read.
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
        file = path / _choose(path) if is_folder(path) else path
        files = DataFiles(file.parent)
        holders = (_open_indexed if _INDEX.fullmatch(file.name) else _open)(files, file)
        entries = _Entries(file, list(holders), {key: state.paths[key] for key, state in holders.items()})
        states = list(dict.fromkeys(holders.values()))
        keys = [key for state in states for key in (*state.paths, *state.others)]
        model = find_model(entries, prefix, of_lightning=_LIGHTNING in keys)
        tensors = {name: _stored(holders[key], key) for name, key in model.keys.items()}
        super().__init__(file.parent, files, tensors, locator(files), ranks=ranks, rank=rank, device=device)
        exported = set(model.keys.values())
        self.skipped = tuple(key for key in keys if key not in exported)
        num_files = f"{len(states):,} files" if len(states) > 1 else ""
        self.description = self.describe(f"state dict {file.name}", num_files, prefix=model.prefix)


def _open(files: DataFiles, file: Path) -> dict[str, StateFile]:
    """Return the only file that there is for every key in it."""
    state = StateFile(files, file.name)
    return dict.fromkeys(state.paths, state)


def _open_indexed(files: DataFiles, index_file: Path) -> dict[str, StateFile]:
    """Return for every key of an index the file that has it."""
    index = read_index(index_file)
    names = sorted(set(index.values()))
    missing = [name for name in names if not is_file(index_file.parent / name)]
    if missing:
        found = f"{len(names) - len(missing):,} of {len(names):,} files, without {listing(missing)}"
        raise SourceError("missing files", file=index_file, found=found, fix="Copy the others here")
    states = {name: StateFile(files, name) for name in names}
    absent = [key for key, name in index.items() if key not in states[name].paths]
    if absent:
        fix = "The files are of different saves; use another checkpoint"
        raise SourceError("tensors that are not in the files", file=index_file, found=listing(absent), fix=fix)
    return {key: states[name] for key, name in index.items()}


def recognizes(file_names: Collection[str]) -> bool:
    """Tell from the names of a folder's files whether one of them, or several with an index, may be a full model."""
    return bool(_candidates(file_names))


def holds_model(file_names: Collection[str]) -> bool:
    """Tell whether one of a folder's files has a name that only whole models have."""
    return not set(_KNOWN).isdisjoint(file_names)


def _candidates(file_names: Iterable[str]) -> list[str]:
    """Return the files that could be meant: the best known one alone, or else all that are not called otherwise."""
    names = set(file_names)
    known = [name for name in _KNOWN if name in names] or sorted(filter(_INDEX.fullmatch, names))
    if known:
        return known[:1]
    return sorted(name for name in names if _STATE_FILE.fullmatch(name) and not _OTHER_STATE.fullmatch(name))


def _choose(folder: Path) -> str:
    """Return the file of a folder that is meant."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise NotFoundError("no state dict", file=folder, found=error.strerror or error, fix=_NAME_IT) from error
    candidates = _candidates(names)
    if not candidates:
        raise NotFoundError("no state dict", file=folder, found=listing(names) or "nothing", fix=_NAME_IT)
    if len(candidates) > 1:
        found = listing(candidates)
        raise UsageError("several files that could be meant", file=folder, found=found, fix="Name one of them")
    return candidates[0]


def _stored(state: StateFile, key: str) -> StoredTensor:
    tensor = state.tensor(key)
    view = _whole(state, key, tensor) if isinstance(tensor, DTensor) else tensor
    place = state.stored(view, key)
    chunks = (Chunk(Box.whole(view.shape), place),) if math.prod(view.shape) else ()
    return StoredTensor(key, view.shape, view.dtype, chunks)


def _whole(state: StateFile, key: str, dtensor: DTensor) -> TensorView:
    """Return the local tensor of a DTensor that is not sharded."""
    try:
        mesh = Meshes(0).mesh_of(dtensor)
        sharding = sharding_of(dtensor, mesh.mesh, key)
    except ValueError as error:
        raise SourceError("a DTensor that makes no sense", name=key, file=state.file, found=error) from error
    if not sharding.is_replicated or dtensor.local.shape != dtensor.shape:
        found = f"{list(dtensor.local.shape)} of {list(dtensor.shape)} on {mesh}"
        fix = "Name the folder with the files of all ranks, called as verl or accelerate calls them"
        raise SourceError("a shard of a DTensor", name=key, file=state.file, found=found, fix=fix)
    return dtensor.local
