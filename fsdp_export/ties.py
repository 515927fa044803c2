"""Which names are tied: in a module those of one parameter, else those of which the config says so and that are equal.

A tie that the config declares is broken where a module has two parameters for it, since it was wrapped part by part or
was never tied. As long as these are equal they count as one; else both are exported, and the config gets another flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .conversion.aliases import declared_aliases, find_aliases, output_embeddings, own_ties
from .conversion.lora_view import LoraView
from .conversion.peft_module import PeftModule, base_twins
from .conversion.transformers import HubForm
from .errors import DisagreementError
from .fence import Operation
from .memory import bytes_of
from .sources.base import Source
from .sources.live import named_tensors
from .spec import TensorSpec
from .steps import Rows
from .walk import CHUNK_BYTES

__all__ = ["LiveTies", "are_equal", "config_ties", "equal_ties", "live_ties", "tied_names"]


@dataclass(frozen=True)
class LiveTies:
    """The ties of a live module.

    Attributes:
        aliases: Names to leave out, and the name under which the same parameter is exported.
        broken: Names that the config declares to be tied to others, which are other parameters.
        are_undeclared: Whether embeddings are tied that the config declares not to be.
        ended: Names whose tie ends as an adapter is merged, so that they have values of their own.
    """

    aliases: Mapping[str, str]
    broken: Mapping[str, str]
    are_undeclared: bool
    ended: Sequence[str] = ()


def live_ties(model: nn.Module, peft: PeftModule | None = None, view: LoraView | None = None) -> LiveTies:
    """Find the ties of a module, or of the model that PEFT's adapters are merged into. Local; no value is looked at.

    A tie holds between tensors that stay as they are, or that the same tensors of an adapter change in the same way.
    What is tied to one that an adapter changes or replaces has values of its own from then on, as it had in training.

    Args:
        model: The module.
        peft: What PEFT has made of it; None where it has made nothing of it, or names are kept.
        view: The merged model.

    Raises:
        SourceError: As `named_tensors`.
    """
    named: dict[str, object] = {**named_tensors(model)}
    changed: set[int] = set()
    if peft is not None and view is not None:
        own = {base: named[spec.name] for base, spec in view.origins.items()}
        unchanged = {base: value for base, value in own.items() if base not in view.updates}
        changed = {id(named[name]) for name in named.keys() - {view.origins[base].name for base in unchanged}}
        named = {base: unchanged.get(base) for base in own} | _changed_alike(own, named, view)
    aliases = find_aliases(named, model if peft is None else peft.base)
    declared: dict[str, str] = {}
    outputs: set[str] = set()
    for path, twin in base_twins(model, peft):
        declared |= {path + alias: path + kept for alias, kept in own_ties(twin).items()}
        outputs |= {path + name for name in output_embeddings(twin)}
    # Of several names of one parameter, that under which it is exported counts for all.
    pairs = {
        alias: aliases.get(kept, kept)
        for alias, kept in declared.items()
        if alias in named and kept in named and aliases.get(alias) not in declared
    }
    distinct = {alias: kept for alias, kept in pairs.items() if named[alias] is not named[kept] or named[kept] is None}
    broken = {
        alias: kept
        for alias, kept in distinct.items()
        if None not in (named[alias], named[kept]) and alias not in aliases
    }
    ended = {*distinct.keys() - broken.keys()}
    ended |= {name for name, value in named.items() if id(value) in changed} - {*broken, *broken.values()}
    return LiveTies(aliases, broken, bool(outputs & (aliases.keys() - declared.keys())), sorted(ended))


def _changed_alike(own: Mapping[str, object], named: Mapping[str, object], view: LoraView) -> dict[str, torch.Tensor]:
    """Return one tensor, whichever, for all names of a parameter to which the same adapters do the same."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for base, updates in view.updates.items():
        made_of = (id(named[spec.name]) for update in updates for spec in (*update.by_unit, *update.whole))
        how = ((update.form, update.scaling, update.tokens, update.rounds) for update in updates)
        alike.setdefault((id(own[base]), *made_of, *how), []).append(base)
    groups = [(bases, torch.empty(0, device="cpu")) for bases in alike.values() if len(bases) > 1]
    return {base: shared for bases, shared in groups for base in bases}


def equal_ties(source: Source, ties: LiveTies, operation: Operation, specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the broken ties of which both parameters have the same values. Collective.

    Args:
        source: What is exported.
        ties: Its ties.
        operation: The fence's operation.
        specs: The tensors of the source by the names that the ties have.

    Raises:
        DisagreementError: The ranks' configs, or their versions of transformers, declare different ties.
    """
    equal = []
    for alias, kept in ties.broken.items():
        operation.check()
        one, other = specs[alias], specs[kept]
        rows = one.sharding.box(one.shape, source.rank).rows
        equal.append(one.sharding == other.sharding and are_equal(source, one, other, rows, operation))
    differing = _differing(ties.broken, equal, source, operation)
    return {alias: kept for alias, kept in ties.broken.items() if alias not in differing}


def tied_names(
    source: Source, origins: Mapping[str, TensorSpec | None], hub: HubForm | None, operation: Operation
) -> tuple[dict[str, str], list[str]]:
    """Find the names under which a checkpoint stores a tied tensor once more. Collective; each rank compares a part.

    Args:
        source: The checkpoint.
        origins: The names that can be exported, and the tensors that they are; None for what is made of others.
        hub: The form of its config's model, which declares ties; None if there is none.
        operation: The fence's operation.

    Returns:
        Each name to leave out with the name that stands for it, and the names that should be tied and differ.

    Raises:
        DisagreementError: The ranks' configs, or their versions of transformers, declare different ties.
        SourceError: The tensors cannot be read.
    """
    declared = declared_aliases(hub.twin, origins, hub.renamed) if hub is not None else {}
    part, parts = source.ranks.index(source.rank), len(source.ranks)
    equal = []
    for alias, kept in declared.items():
        one, other = origins[alias], origins[kept]
        rows = (one.num_rows * part // parts, one.num_rows * (part + 1) // parts) if one is not None else (0, 0)
        # What is made of others counts as different.
        equal.append(one is not None and other is not None and are_equal(source, one, other, rows, operation))
    differing = _differing(declared, equal, source, operation)
    return {alias: kept for alias, kept in declared.items() if alias not in differing}, sorted(differing)


def config_ties(hub: HubForm) -> dict[str, str]:
    """Return the names that a config declares to be tied, whether or not a checkpoint has both, each with that kept."""
    return declared_aliases(hub.twin, {*hub.own, *hub.inputs}, hub.renamed)


def _differing(declared: Mapping[str, str], equal: list[bool], source: Source, operation: Operation) -> set[str]:
    """Return the ties that differ in the part of some rank."""
    everyones = operation.agree(json.dumps([list(declared.items()), equal]))
    # A rank that finds none of a live module compares none: what it says here is of its plan.
    found = [json.loads(text) if text.startswith("[") else [[], []] for text in everyones]
    ties, verdicts = zip(*found, strict=True)
    if any(theirs != ties[0] for theirs in ties):
        raise DisagreementError(
            "the ranks find different tied weights",
            found="; ".join(f"rank {rank}: {dict(theirs)}" for rank, theirs in zip(source.ranks, ties, strict=True)),
            fix="Use the same transformers and the same --base-model on every host",
        )
    return {alias for alias, *theirs in zip(declared, *verdicts, strict=True) if not all(theirs)}


def are_equal(source: Source, one: TensorSpec, other: TensorSpec, rows: Rows, operation: Operation) -> bool:
    """Compare rows of two tensors byte by byte, a chunk at a time: on a GPU a comparison takes as much memory again."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    count = max(CHUNK_BYTES // max(one.row_bytes, 1), 1)
    for first in range(*rows, count):
        operation.check()
        some, others = (source.rows(spec, first, min(first + count, rows[1])) for spec in (one, other))
        if not torch.equal(bytes_of(some), bytes_of(others)):
            return False
    return True
