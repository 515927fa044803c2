"""Rows of what a plan makes of a checkpoint on disk, asked for in any order; a walk delivers them in its own."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from .plan import Plan
from .sources.stored import StoredSource
from .spec import TensorInfo
from .steps import Rows, Step

__all__ = ["PlannedRows"]

_Made = dict[str, torch.Tensor]


class PlannedRows:
    """Makes rows of a plan's outputs when they are asked for.

    Of an output that is rows of a tensor no others are read. A part of one row, such as an expert, is made whole, and
    kept by each thread until it makes another; what only a whole step makes is made whole too, one step at a time.

    Args:
        plan: The plan.
        source: The checkpoint it was made for.

    Attributes:
        specs: The outputs.
        is_concurrent: Whether rows may be asked for by several threads at once, without making steps again and again.
    """

    def __init__(self, plan: Plan, source: StoredSource) -> None:
        self.specs = plan.outputs
        self.is_concurrent = source.is_concurrent and not any(step.whole for step in plan.steps)
        self._source = source
        self._steps = {output.name: step for step in plan.steps for output in step.outputs}
        self._parts = {part.info.name: part for step in plan.steps for part in step.parts}
        self._made = threading.local()

    def rows(self, info: TensorInfo, first: int, stop: int) -> torch.Tensor:
        """Return rows of an output, on the CPU; all of a 0-dim one.

        Raises:
            ExportError: They cannot be read, or not be converted.
        """
        step, part = self._steps[info.name], self._parts.get(info.name)
        if part is not None and part.rows[1] - part.rows[0] > 1:
            begin = part.rows[0]
            return self._convert(step, (begin + first, begin + stop))[info.name]
        tensor = self._unit(step, part.rows if part is not None else (0, step.num_units))[info.name]
        return tensor[first:stop] if info.shape else tensor

    def file_of(self, name: str) -> Path:
        """Return the file that has the tensor that an output is made of; the folder where several have it."""
        step = self._steps[name]
        files = {self._source.file_of(spec.name) for spec in step.inputs}
        return files.pop() if len(files) == 1 else self._source.folder or Path()

    def close(self) -> None:
        """Close the files, and let go of what is kept."""
        self._made = threading.local()
        self._source.close()

    def _unit(self, step: Step, units: Rows) -> _Made:
        """Return what units make, from memory if this thread has just made it."""
        known: tuple[Step, Rows, _Made] | None = getattr(self._made, "unit", None)
        if known is not None and known[0] is step and known[1] == units:
            return known[2]
        self._made.unit = known = None  # so that there are never two
        made = self._convert(step, units)
        self._made.unit = (step, units, made)
        return made

    def _convert(self, step: Step, units: Rows) -> _Made:
        by_unit = [_cast(self._source.rows(spec, *units), step.read_dtype) for spec in step.by_unit]
        return {piece.info.name: piece.tensor.cpu() for piece in step.convert(by_unit + self._whole(step), units[0])}

    def _whole(self, step: Step) -> list[torch.Tensor]:
        """Read the inputs that every unit of a step needs whole, unless this thread has just done so."""
        known: tuple[Step, list[torch.Tensor]] | None = getattr(self._made, "whole", None)
        if not step.whole or (known is not None and known[0] is step):
            return known[1] if step.whole and known is not None else []
        self._made.whole = known = None
        tensors = [_cast(self._source.rows(spec, 0, spec.num_rows), step.read_dtype) for spec in step.whole]
        if step.by_unit:
            self._made.whole = (step, tensors)
        return tensors


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)
