"""What a source is: names and shapes first, rows later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ..gather import Groups
from ..spec import TensorSpec
from ..steps import Extent

__all__ = ["Source"]


class Source(Protocol):
    """Named tensors, some or all of whose rows this rank can hand out.

    Attributes:
        specs: All tensors, in the order in which a checkpoint lists them. Known without reading one.
        ranks: The global ranks that export together; `(0,)` without a process group.
        rank: This process's global rank.
        device: Where tensors that are gathered or converted are put.
        folder: The folder that is read, which therefore must not be replaced; None for a live module.
        description: One line that says what was found.
        copies: Tensors of which every rank has a copy of its own that nothing keeps equal.
        groups: Process groups along the mesh axes that specs name, where they have more than one rank.
        is_concurrent: Whether rows may be asked for by several threads at once.
    """

    specs: tuple[TensorSpec, ...]
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    folder: Path | None
    description: str
    copies: tuple[TensorSpec, ...]
    groups: Groups
    is_concurrent: bool

    def refresh(self) -> None:
        """Look again for what may have changed since the last walk. Called before every walk."""
        ...

    def close(self) -> None:
        """Let go of memory and files. Called after every walk."""
        ...

    def rows(self, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        """Return this rank's block of rows `first` to before `stop` of a tensor.

        The rows must lie within the block that `spec.sharding` gives this rank; in the other dims the result has
        the size of that block. It may alias the source's memory, on whatever device that is, and need not be
        contiguous. A 0-dim tensor is returned as it is, for rows 0 to 1. Not collective.

        Raises:
            SourceError: The rows cannot be read.
        """
        ...

    def extents(self, spec: TensorSpec, first: int, stop: int) -> Sequence[Extent] | None:
        """Return where the bytes of rows `first` to before `stop` of a tensor lie in files, in order.

        Returns:
            None where they do not lie there just as `rows` returns them, or in too many places, so that they have to
            be read.

        Raises:
            SourceError: The files cannot be read.
        """
        ...
