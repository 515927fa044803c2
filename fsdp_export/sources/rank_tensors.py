"""The tensors of all rank files put together: of each the blocks that ranks hold, or the copies that all have."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import COPY_AGAIN, SourceError
from ..spec import Box, Sharding
from .archive import DataFiles, read_rows
from .dtensor_pickle import DTensor, Meshes, sharding_of
from .state_file import StateFile
from .stored import Chunk, StoredTensor
from .tensor_pickle import TensorView
from .torch_archive import StoredView, locate_view

__all__ = ["RankTensors"]

_COMPARE_BYTES = 4 << 20
_DIFFERENT_SAVES = "The files are of different saves; use another step"


@dataclass(slots=True)
class _Tensor:
    """What the rank files say of one tensor.

    Attributes:
        shape: Its global shape.
        dtype: Its dtype.
        sharding: How it lies on the mesh of the first file that has it; None for a plain tensor.
        blocks: Where its blocks lie, each in the first file that has it.
        copies: Where the copies of a plain tensor lie.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding | None
    blocks: dict[Box, StoredView] = field(default_factory=dict)
    copies: list[StoredView] = field(default_factory=list)

    @property
    def form(self) -> tuple[object, ...]:
        """What all files must say alike. Meshes may be of other ranks: a tensor may have several, beside each other."""
        layout = self.sharding and (self.sharding.mesh.shape, self.sharding.cuts)
        return self.shape, self.dtype, layout

    def __str__(self) -> str:
        kind = f"DTensor on mesh {self.sharding.mesh}" if self.sharding else "plain tensor"
        return f"a {kind} {list(self.shape)} {self.dtype}"


class RankTensors:
    """The tensors of all rank files.

    Args:
        files: The folder's data files.

    Attributes:
        file: The file that was added first.
        tensors: Their keys, in the order of that file.
        paths: For every key the nested keys that it is made of.
        others: Entries that are no tensors.
        ranks: The ranks among which DTensors are sharded.
    """

    def __init__(self, files: DataFiles) -> None:
        self.file: Path = files.folder
        self.tensors: list[str] = []
        self.paths: dict[str, tuple[str, ...]] = {}
        self.others: dict[str, None] = {}
        self.ranks: set[int] = set()
        self._files = files
        self._tensors: dict[str, _Tensor] = {}
        self._meshes: Counter[str] = Counter()
        self._num_files = 0

    @property
    def mesh(self) -> str:
        """The mesh that most DTensors are on, as text; empty if there are no DTensors."""
        return next((mesh for mesh, _ in self._meshes.most_common(1)), "")

    def add(self, state: StateFile, rank: int) -> None:
        """Add what a rank saved.

        Raises:
            SourceError: It does not fit what was added before, or a DTensor is not understood.
        """
        if not self.tensors:
            self.file = state.file
        self._num_files += 1
        self.tensors += [key for key in state.paths if key not in self.paths]
        self.paths |= state.paths
        meshes = Meshes(rank)
        self.others |= dict.fromkeys(state.others)
        for key in state.paths:
            tensor = state.tensor(key)
            if isinstance(tensor, TensorView):
                self._add_plain(state, key, tensor)
                continue
            try:
                self._add_dtensor(state, key, tensor, meshes)
            except ValueError as error:
                what = "a DTensor that makes no sense"
                raise SourceError(what, name=key, file=state.file, found=error, fix=COPY_AGAIN) from error
        for mesh in meshes.found:
            self.ranks.update(mesh.mesh.ranks)

    def holes(self, key: str) -> list[int]:
        """Return the ranks that should have had the blocks of a tensor that no file has."""
        tensor = self._tensors[key]
        if tensor.sharding is None:
            return []
        if tensor.sharding.is_replicated:  # on more ranks, perhaps, than need be looked at
            whole = Box.whole(tensor.shape)
            return [] if 0 in tensor.shape or whole in tensor.blocks else [tensor.sharding.mesh.ranks[0]]
        holders = tensor.sharding.holders(tensor.shape)
        return sorted(ranks[0] for box, ranks in holders if 0 not in box.shape and box not in tensor.blocks)

    def stored(self, key: str) -> StoredTensor:
        """Return a tensor that has no holes.

        Raises:
            SourceError: It is a plain tensor, and ranks saved different ones.
        """
        tensor = self._tensors[key]
        if tensor.sharding is None:
            self._compare_copies(key, tensor)
            if 0 not in tensor.shape:
                tensor.blocks[Box.whole(tensor.shape)] = tensor.copies[0]
        chunks = [Chunk(box, place) for box, place in tensor.blocks.items()]
        chunks.sort(key=lambda chunk: chunk.box.start)
        return StoredTensor(key, tensor.shape, tensor.dtype, tuple(chunks))

    def _add_plain(self, state: StateFile, key: str, view: TensorView) -> None:
        stored = state.stored(view, key)
        tensor = self._tensors.setdefault(key, _Tensor(view.shape, view.dtype, None))
        if tensor.sharding is not None or tensor.dtype != view.dtype:
            self._refuse(state, key, tensor, _Tensor(view.shape, view.dtype, None))
        if tensor.shape != view.shape:
            raise self._copies_differ(key, f"{list(tensor.shape)} and {list(view.shape)}")
        tensor.copies.append(stored)

    def _add_dtensor(self, state: StateFile, key: str, dtensor: DTensor, meshes: Meshes) -> None:
        mesh, local = meshes.mesh_of(dtensor), dtensor.local
        if mesh.saved_by not in {None, meshes.rank}:
            expected, found = f"that of rank {meshes.rank}", f"that of rank {mesh.saved_by}"
            fix = "Give every file the name back under which it was saved"
            raise SourceError("the file of another rank", file=state.file, expected=expected, found=found, fix=fix)
        self._meshes[str(mesh)] += 1
        sharding = sharding_of(dtensor, mesh.mesh, key)
        new = _Tensor(dtensor.shape, local.dtype, sharding)
        tensor = self._tensors.setdefault(key, new)
        if tensor.form != new.form:
            self._refuse(state, key, tensor, new)
        if meshes.rank not in mesh.mesh.ranks:
            return
        box = sharding.box(dtensor.shape, meshes.rank)
        is_empty = 0 in box.shape
        if local.shape != box.shape and not (is_empty and 0 in local.shape):
            raise SourceError(
                "a local tensor that is not what its placements say",
                name=key,
                file=state.file,
                expected=list(box.shape),
                found=list(local.shape),
                fix="Save a state dict whose DTensors are as torch sharded them",
            )
        if not is_empty and box not in tensor.blocks:
            tensor.blocks[box] = state.stored(local, key)

    def _refuse(self, state: StateFile, key: str, one: _Tensor, other: _Tensor) -> None:
        found = f"{one} in {self.file.name} and {other}"
        raise SourceError("rank files that differ", name=key, file=state.file, found=found, fix=_DIFFERENT_SAVES)

    def _compare_copies(self, key: str, tensor: _Tensor) -> None:
        """Refuse a plain tensor of which files have different values, or some none."""
        if len(tensor.copies) < self._num_files:
            raise self._copies_differ(key, f"it in {len(tensor.copies):,} of {self._num_files:,} files")
        first, *others = tensor.copies
        num_rows = tensor.shape[0] if tensor.shape else 1
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        rows = max(_COMPARE_BYTES // max(row_bytes, 1), 1)
        for begin in range(0, num_rows if others else 0, rows):
            shape = (min(rows, num_rows - begin), *tensor.shape[1:]) if tensor.shape else ()
            expected = self._read(first, begin, shape)
            for other in others:
                if not torch.equal(self._read(other, begin, shape), expected):
                    raise self._copies_differ(key, f"other values in {other.file} than in {first.file}")

    def _read(self, stored: StoredView, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        target = torch.empty(shape, dtype=stored.view.dtype, device="cpu")
        read_rows(self._files, locate_view(self._files, stored), first, target)
        return target.reshape(-1).view(torch.uint8)

    def _copies_differ(self, key: str, found: str) -> SourceError:
        return SourceError(
            "plain tensors that differ from rank to rank",
            name=key,
            file=self._files.folder,
            expected="DTensors, or the same values in every file",
            found=found,
            fix="Nothing tells how they make up one tensor: save DTensors, not to_local()",
        )
