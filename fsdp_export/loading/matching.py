"""What of a checkpoint fills which tensor of a module, and what does not fit: everything, before a byte is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..conversion.assembly import Assembled, Patch, assemble
from ..conversion.loading import Loaded
from ..conversion.views import View
from ..dtypes import are_cast
from ..errors import SourceError, listing
from ..spec import Box, TensorInfo, TensorSpec
from ..table import dtype_name
from .target import Target

__all__ = ["Fill", "Match", "match"]

_SHOWN = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor of a module, and what it is made of.

    Attributes:
        spec: The tensor.
        made: What fills it.
        name: What it is called where it is made.
    """

    spec: TensorSpec
    made: Assembled
    name: str


@dataclass
class Match:
    """How a checkpoint fits a module.

    Attributes:
        fills: What is loaded.
        missing: Names that the checkpoint lacks: those it would have.
        unexpected: Names for which the module has no tensor.
        misfits: What has another shape or dtype, or cannot be made, in words.
        twice: Pairs of tensors of the checkpoint that the module has as one.
        unfilled: Names of the module's tensors that are not loaded.
    """

    fills: list[Fill] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    twice: list[tuple[TensorSpec, TensorSpec]] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)

    def error(self, folder: Path | None, *, strict: bool) -> SourceError | None:
        """Return the one error that says all that does not fit; None if everything does.

        Args:
            folder: The checkpoint.
            strict: Whether missing and unexpected names count.
        """
        kinds = [("missing", self.missing), ("unexpected", self.unexpected)] if strict else []
        kinds.append(("that do not fit", self.misfits))
        found = "; ".join(f"{len(items):,} {kind}: {listing(items, _SHOWN)}" for kind, items in kinds if items)
        if not found:
            return None
        fix = "Load it into the model that it was saved from"
        if strict and not self.misfits:
            fix += ", or give strict=False to leave out what is missing and unexpected"
        return SourceError("a checkpoint that does not fit the model", file=folder, found=found, fix=fix)

    def sources(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[TensorSpec, TensorSpec]]:
        """Return what of the checkpoint fills pairs of tensors of the module, where that is not the same for both."""
        made = {fill.spec.name: fill.made for fill in self.fills}
        return _distinct((made[one], made[other]) for one, other in pairs)


def match(target: Target, specs: Sequence[TensorSpec], *, is_sharded: bool, casts: bool) -> Match:
    """Find out what of a checkpoint fills which tensor of a module. Local, and no value is looked at.

    Args:
        target: The module.
        specs: The tensors of the checkpoint.
        is_sharded: Whether its layout is one that trainers write, with names of modules where these are also others.
        casts: Whether floating tensors are cast to the dtypes that the module has.

    Raises:
        PlanError: The conversion does not return tensors.
    """
    direct = _direct_names(target, {spec.name for spec in specs}, is_sharded=is_sharded)
    made, loaded = _assembled(target, specs, direct)
    result, filled, lacking = Match(), _filled(target, made), _lacking(target, {spec.name for spec in specs})
    for name, spec in target.specs.items():
        if (found := filled.get(name)) is not None:
            problem = _misfit(spec, found.made, target, casts=casts) or _mix_up(
                spec, found.made, target, lacking.get(name, ())
            )
            if problem is None:
                result.fills.append(replace(found, made=_shaped(found.made, spec.shape)))
            else:
                result.misfits.append(problem)
        elif name in loaded.failed:
            result.misfits.append(f"{name}: {loaded.failed[name]}{_without(lacking.get(name, ()))}")
        elif name in target.optional:
            result.unfilled.append(name)
        else:
            result.missing += lacking.get(name, [name])
            result.unfilled.append(name)
    result.missing = list(dict.fromkeys(result.missing))
    result.twice = _twice(target, made)
    result.unexpected = _unexpected(target, specs, made, loaded)
    return result


def _direct_names(target: Target, names: set[str], *, is_sharded: bool) -> set[str]:
    """Return the names of a checkpoint that are those of the module's tensors, and mean these.

    A name may be one of the hub as well, with elements in another order. Then those names tell that are not both.
    """
    own, hub = target.names, set(target.hub.names if target.hub is not None else ())
    known = own.intersection(names)
    if target.keeps_names or not hub:
        return known
    has_own, has_hub = bool(known - hub), not hub.isdisjoint(names - own)
    return known if has_own or (is_sharded and not has_hub) else set()


def _assembled(
    target: Target, specs: Sequence[TensorSpec], direct: Collection[str]
) -> tuple[dict[str, Assembled], Loaded]:
    """Follow what becomes of the tensors of a checkpoint."""
    made = {}
    for spec in specs:
        if spec.name in direct:
            whole = Patch(Box.whole(spec.shape), spec.name, View(0, _strides(spec.shape)))
            made[spec.name] = Assembled(spec, (spec,), (whole,))
    notes = Loaded()

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loaded = target.load(tensors)
        notes.failed.update(loaded.failed)
        notes.unknown.extend(loaded.unknown)
        return {name: tensor for name, tensor in loaded.tensors.items() if name not in loaded.failed}

    others = [spec for spec in specs if spec.name not in direct]
    for each in assemble(convert, others) if others else ():
        made.setdefault(each.info.name, each)
    return made, notes


def _filled(target: Target, made: Mapping[str, Assembled]) -> dict[str, Fill]:
    """Find what fills each tensor: under its own name, a further one, or that of one to which it should be tied."""
    candidates = {name: [name] for name in target.specs}
    for alias, kept in target.aliases.items():
        candidates[kept].append(alias)
    for alias, kept in target.declared.items():
        for one, other in ((alias, kept), (kept, alias)):
            candidates[one] += [other, *(name for name, of in target.aliases.items() if of == other)]
    found = {name: next((each for each in names if each in made), None) for name, names in candidates.items()}
    return {
        name: Fill(target.specs[name], made[source], source) for name, source in found.items() if source is not None
    }


def _misfit(spec: TensorSpec, made: Assembled, target: Target, *, casts: bool) -> str | None:
    """Say what keeps a tensor from being loaded; None if nothing does."""
    is_one_value = spec.num_bytes == spec.dtype.itemsize and _numel(made.info) == 1  # FSDP2 takes no 0-dim parameter
    if made.info.shape != spec.shape and not is_one_value:
        of = f", made of {len(made.inputs):,}" if len(made.inputs) > 1 else ""
        return f"{spec.name}: expected {list(spec.shape)}, found {list(made.info.shape)}{of}"
    # torch casts what is joined to one dtype.
    for found in (*made.inputs, made.info) if target.only_moves else (made.info,):
        if found.dtype != spec.dtype and not (casts and are_cast(found.dtype, spec.dtype)):
            of = f" in {found.name}" if len(made.inputs) > 1 and found is not made.info else ""
            return f"{spec.name}: expected {dtype_name(spec.dtype)}, found {dtype_name(found.dtype)}{of}"
    return None


def _mix_up(spec: TensorSpec, made: Assembled, target: Target, lacking: Sequence[str]) -> str | None:
    """Say that a tensor is put together of others than it should be, such as experts of other numbers; else None."""
    if len(made.inputs) == 1 or not lacking or target.hub is None:
        return None
    forms, known = {_NUMBER.sub("#", name) for name in lacking}, set(target.hub.names)
    surplus = [each.name for each in made.inputs if each.name not in known and _NUMBER.sub("#", each.name) in forms]
    return f"{spec.name}: made of {listing(surplus, 1)}{_without(lacking)}" if surplus else None


def _without(lacking: Collection[str]) -> str:
    return f", without {listing(lacking, 1)}" if lacking else ""


def _shaped(made: Assembled, shape: tuple[int, ...]) -> Assembled:
    """Return the same in the shape that the module has; it differs where there is one value."""
    if made.info.shape == shape or made.patches is None:
        return made
    patches = tuple(
        Patch(Box.whole(shape), patch.source, View(patch.view.offset, (0,) * len(shape))) for patch in made.patches
    )
    return Assembled(TensorInfo(made.info.name, shape, made.info.dtype), made.inputs, patches)


def _lacking(target: Target, present: Collection[str]) -> dict[str, list[str]]:
    """Return the names that a checkpoint would have for each tensor, and this one lacks."""
    lacking: dict[str, list[str]] = {}
    for name in target.hub.names if target.hub is not None else ():
        if name not in present:
            for own in target.hub.made_of(name) if target.hub is not None else ():
                lacking.setdefault(own, []).append(name)
    return lacking


def _twice(target: Target, made: Mapping[str, Assembled]) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return what a checkpoint has under several names of one parameter, which then must be equal."""
    names = [(alias, kept) for alias, kept in target.aliases.items() if alias in made and kept in made]
    return _distinct((made[alias], made[kept]) for alias, kept in names)


def _distinct(pairs: Iterable[tuple[Assembled, Assembled]]) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return what two tensors that must be equal are made of, pair by pair."""
    inputs = [pair for one, other in pairs for pair in zip(one.inputs, other.inputs, strict=False)]
    return [(one, other) for one, other in inputs if one != other]


def _unexpected(
    target: Target, specs: Iterable[TensorSpec], made: Mapping[str, Assembled], loaded: Loaded
) -> list[str]:
    own = target.names
    used = {spec.name for name, each in made.items() if name in own for spec in each.inputs}
    # What was to be a part of a tensor that could not be made is told with that.
    return [
        spec.name
        for spec in specs
        if spec.name not in used
        and not target.is_ignored(spec.name)
        and (spec.name in loaded.unknown or not loaded.failed)
    ]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _numel(info: TensorInfo) -> int:
    return info.num_bytes // info.dtype.itemsize
