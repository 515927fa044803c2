"""A state dict with LoRA in it as something else has it: the merged model, or the adapter alone.

What is seen has names of its own, and the shapes, dtypes and shardings of the tensors behind them. Steps are made for
it as for any tensors; then `on_source` gives them the inputs that are there, and a merge before what they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..spec import TensorSpec
from ..steps import Piece, Step
from .low_rank import Update, merged_rows

__all__ = ["LoraView"]


@dataclass(frozen=True)
class LoraView:
    """Some tensors of a source under other names, with adapters merged into some of these.

    Attributes:
        kind: What is seen: `merge` for the merged model, `adapter` for the adapter.
        origins: The tensors of the source by the names that are seen, in order.
        updates: What adapters do to some of them, by the same names.
        device: Where to merge.
    """

    kind: str
    origins: Mapping[str, TensorSpec]
    updates: Mapping[str, Sequence[Update]]
    device: torch.device

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors as they are seen."""
        return [replace(spec, name=name) for name, spec in self.origins.items()]

    def origin(self, name: str) -> TensorSpec | None:
        """Return the tensor of the source that is seen under a name; None where an adapter changes it."""
        return None if name in self.updates else self.origins[name]

    @property
    def digest(self) -> str:
        """A hash of what is seen: of which tensors it is made, and how. Plans do not show all of that."""
        names = [(name, spec.name) for name, spec in self.origins.items()]
        facts = [
            (name, update.form, update.scaling, update.tokens, [spec.name for spec in (*update.by_unit, *update.whole)])
            for name, updates in self.updates.items()
            for update in updates
        ]
        return hashlib.sha256(repr((self.kind, names, facts)).encode()).hexdigest()[:16]

    def on_source(self, step: Step) -> Step:
        """Return a step that makes of the source's tensors what a step makes of those that are seen."""
        by_unit, whole = ([self._on_source(spec) for spec in specs] for specs in (step.by_unit, step.whole))
        updates = self._updates(step.inputs)
        if not updates:
            return replace(step, by_unit=tuple(by_unit), whole=tuple(whole))
        rows = [spec for update in self._updates(step.by_unit) for spec in update.by_unit]
        everything = [spec for update in self._updates(step.whole) for spec in update.by_unit]
        everything += [spec for update in updates for spec in update.whole]
        if any(update.needs_all_rows for update in updates):
            by_unit, rows, whole, everything = [], [], [*by_unit, *whole], [*rows, *everything]
        inputs = [*by_unit, *rows, *whole, *everything]
        convert = partial(self._convert, step, [spec.name for spec in inputs])
        merged = (*rows, *everything)
        needed = (*whole, *everything)
        if not by_unit:
            return Step((), step.outputs, 1, None, convert, whole=needed, merged=merged)
        return replace(step, by_unit=(*by_unit, *rows), whole=needed, read_dtype=None, convert=convert, merged=merged)

    def _on_source(self, spec: TensorSpec) -> TensorSpec:
        """Return the tensor of the source that is seen; a conversion may know of more that they are buffers."""
        return replace(self.origins[spec.name], is_buffer=spec.is_buffer)

    def _updates(self, specs: Iterable[TensorSpec]) -> list[Update]:
        return [update for spec in specs for update in self.updates.get(spec.name, ())]

    def _convert(
        self, step: Step, names: Sequence[str], inputs: Sequence[torch.Tensor], first_unit: int
    ) -> Iterator[Piece]:
        tensors = {name: tensor.to(self.device) for name, tensor in zip(names, inputs, strict=True)}
        merged = []
        for spec in step.inputs:
            rows = tensors[self.origins[spec.name].name]
            if spec.name in self.updates:
                rows = merged_rows(rows, first_unit if spec in step.by_unit else 0, self.updates[spec.name], tensors)
            merged.append(rows if step.read_dtype is None else rows.to(step.read_dtype))
        yield from step.convert(merged, first_unit)
