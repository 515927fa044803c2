"""What the ranks must agree on before anything is delivered: one plan, and equal copies of what nothing shards."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from operator import add
from pathlib import Path

import torch

from .errors import DisagreementError, listing
from .fence import Operation
from .memory import bytes_of
from .paths import is_file
from .plan import Plan
from .sources.base import Source
from .sources.stored import StoredSource
from .spec import Box

__all__ = ["agree_on_files", "agree_on_plan", "check_copies", "fingerprint", "refuse_differences"]

_log = logging.getLogger("fsdp_export")
_CHUNK_BYTES = 64 << 20
# Tensors, and elements of each: enough to tell one step of a training from the next.
_SAMPLED = 64
# 2**64 over the golden ratio, as a signed number.
_MIXER = 0x9E3779B97F4A7C15 - 2**64


def agree_on_plan(plan: Plan, options: str, operation: Operation) -> None:
    """Compare the plans of all ranks. Collective.

    Args:
        plan: What is exported.
        options: What else decides in which pieces it is gathered, in words.
        operation: The fence's operation.

    Raises:
        DisagreementError: They differ; names the first tensor that does.
    """
    cards = operation.agree(f"{plan.digest} {options}")
    if len(set(cards)) == 1:
        return
    if len({card.split(" ", 1)[0] for card in cards}) == 1:
        choices = [card.split(" ", 1)[1] for card in cards]
        refuse_differences(
            plan.ranks, choices, "the ranks would gather different pieces", "Give every rank the same options"
        )
    lines = list(plan.lines)
    hashes = [hashlib.sha256(line.encode()).hexdigest()[:8] for line in lines]
    everyones = [text.split() for text in operation.agree(" ".join(hashes))]
    shortest = min(map(len, everyones))
    first = next((i for i in range(shortest) if len({theirs[i] for theirs in everyones}) > 1), shortest)
    firsts = operation.agree(lines[first] if first < len(lines) else "nothing")
    what = f"the ranks would export different tensors, first at position {first}"
    fix = "Build the same model, in the same order, on every rank"
    refuse_differences(plan.ranks, firsts, what, fix)
    raise DisagreementError(what, fix=fix)  # the short hashes of the lines that differ are equal


def agree_on_files(source: StoredSource, path: Path, ranks: Sequence[int], operation: Operation) -> None:
    """Refuse to read a checkpoint of which ranks have others: a few of its values tell, where they are in other places.

    Hosts may have a copy each. But one rank may also have passed over the newest step, which it alone cannot read.
    Collective.

    Args:
        source: The checkpoint.
        path: What led to it.
        ranks: The global ranks.
        operation: The fence's operation.

    Raises:
        DisagreementError: They have others.
        SourceError: It cannot be read.
    """
    place = path if is_file(path) or source.folder is None else source.folder
    places = operation.agree(str(place.resolve()))
    if len(set(places)) == 1:
        return
    what = "the ranks would read checkpoints with different values"
    fix = "Give every rank a path that leads to the same checkpoint, and see that each can read it"
    refuse_differences(ranks, operation.agree(_sample(source)), what, fix, shown=places)


def _sample(source: StoredSource) -> str:
    """Return a digest of a few values from the middle of some tensors."""
    specs, values = [spec for spec in source.specs if spec.num_bytes], hashlib.sha256()
    for spec in specs[:: len(specs) // _SAMPLED + 1]:
        *outer, inner = spec.shape or (1,)
        count = min(inner, _SAMPLED)
        start = (*(size // 2 for size in outer), (inner - count) // 2)[: len(spec.shape)]
        shape = (*(1 for _ in outer), count)[: len(spec.shape)]
        box = Box(start, tuple(map(add, start, shape)))
        part = torch.empty(shape, dtype=spec.dtype, device="cpu")
        source.check(spec, box)
        source.read(spec, box, part)
        values.update(repr(spec.name).encode() + bytes(bytes_of(part).tolist()))
    return values.hexdigest()


def check_copies(plan: Plan, source: Source, operation: Operation) -> None:
    """Compare tensors of which every rank has a copy of its own. Collective.

    Args:
        plan: What is exported.
        source: Where it is.
        operation: The fence's operation.

    Raises:
        DisagreementError: A parameter differs. Buffers that differ (the statistics of a BatchNorm, say) are logged.
    """
    if not source.copies:
        return
    planned = {spec for step in plan.steps for spec in step.inputs}
    copies = [spec for spec in source.copies if spec in planned]
    if not copies:
        return
    mine = []
    for spec in copies:
        operation.check()
        mine.append(fingerprint(source.rows(spec, *spec.sharding.box(spec.shape, source.rank).rows)))
    everyones = [text.split() for text in operation.agree(" ".join(mine))]
    differing = []
    for index, spec in enumerate(copies):
        blocks = {
            (spec.sharding.box(spec.shape, rank), theirs[index])
            for rank, theirs in zip(plan.ranks, everyones, strict=True)
        }
        if len(blocks) > len(spec.sharding.holders(spec.shape)):
            differing.append(spec)
    parameters = [spec.name for spec in differing if not spec.is_buffer]
    if parameters:
        raise DisagreementError(
            f"parameters differ between ranks that have copies of them: {listing(parameters)}",
            fix="Broadcast them from one rank first; experts that live on one rank each must be DTensors",
        )
    if differing:
        names = listing(spec.name for spec in differing)
        _log.warning("buffers differ between ranks, that of the first rank is exported: %s", names)


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a checksum of the bytes of a tensor, computed where it is: two sums over its 64-bit words, one weighted.

    The words are mixed first, or changes of high bits, two signs say, would cancel out. It tells copies that drifted
    apart; it is no defence against a forger.
    """
    flat = bytes_of(tensor.detach())
    plain, weighted = 0, 0
    for begin in range(0, flat.numel(), _CHUNK_BYTES):
        chunk = flat[begin : begin + _CHUNK_BYTES]
        if chunk.numel() % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
        words = chunk.view(torch.int64) if chunk.storage_offset() % 8 == 0 else chunk.clone().view(torch.int64)
        weights = torch.arange(begin, begin + words.numel(), device=words.device).mul_(2).add_(1)
        mixed = (words ^ (words >> 32)).mul_(_MIXER)
        mixed ^= mixed >> 29
        plain += int(mixed.sum())
        weighted += int(weights.mul_(mixed).sum())
    return f"{plain & (2**64 - 1):x}.{weighted & (2**64 - 1):x}"


def refuse_differences(
    ranks: Sequence[int], everyones: Sequence[str], what: str, fix: str, *, shown: Sequence[str] = ()
) -> None:
    """Refuse what is not the same on all ranks.

    Args:
        ranks: The global ranks.
        everyones: What each of them has.
        what: What is wrong if they differ.
        fix: What to do then.
        shown: What is said of each rank; default: what it has.

    Raises:
        DisagreementError: A rank has something else than the first one.
    """
    said = shown or everyones
    for index, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            expected, found = f"as on rank {ranks[0]}: {said[0]}", f"on rank {ranks[index]}: {said[index]}"
            raise DisagreementError(what, expected=expected, found=found, fix=fix)
