"""Which tensors of two checkpoints are compared: those of one name, and those of names that are tied."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..spec import TensorInfo

__all__ = ["Pairs", "Tie", "pair"]

Tie = tuple[str, str]
"""Two names of one tensor: one that may be left out, and one that is kept."""


@dataclass(slots=True)
class Pairs:
    """The tensors of one checkpoint, and those of another one that they are compared with.

    Attributes:
        others: What the tensor of a name is compared with, and the name by which to tell of a difference: the tensor of
            that name in the other checkpoint, and those of names that are tied to it and that only one of the two has.
        missing: Tensors that only the first one has.
        unexpected: Tensors that only the other one has.
    """

    others: dict[str, list[tuple[str, TensorInfo]]] = field(default_factory=dict)
    missing: list[TensorInfo] = field(default_factory=list)
    unexpected: list[TensorInfo] = field(default_factory=list)


def pair(outputs: Sequence[TensorInfo], specs: Sequence[TensorInfo], ties: Iterable[Tie] = ()) -> Pairs:
    """Pair the tensors of two checkpoints.

    Args:
        outputs: Those of the first.
        specs: Those of the other.
        ties: Names that are tied in either of them.
    """
    ours, theirs = ({info.name: info for info in infos} for infos in (outputs, specs))
    tied, pairs = _tied(ties, ours.keys() & theirs.keys()), Pairs()
    left = {name: spec for name, spec in theirs.items() if name not in ours}
    for name, output in ours.items():
        twins = (name, *tied.get(name, ()))
        other = next((twin for twin in twins if twin in theirs), None)
        if other is None:
            pairs.missing.append(output)
        else:
            pairs.others[name] = [(name, theirs[other])]
            left.pop(other, None)
    for name, spec in left.items():
        twin = next((twin for twin in tied.get(name, ()) if twin in ours), None)
        if twin is None:
            pairs.unexpected.append(spec)
        else:
            pairs.others[twin].append((name, spec))
    return pairs


def _tied(ties: Iterable[Tie], common: Collection[str]) -> dict[str, list[str]]:
    """Map each name to all others of its tensor, those that both checkpoints have first."""
    groups: dict[str, dict[str, None]] = {}
    for tie in ties:
        group = {name: None for each in tie for name in groups.get(each, {each: None})}
        groups |= dict.fromkeys(group, group)
    first = {name: sorted(group, key=lambda other: other not in common) for name, group in groups.items()}
    return {name: [other for other in group if other != name] for name, group in first.items()}
