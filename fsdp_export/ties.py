"""Which names of a checkpoint on disk are tied: the config says so, and the values are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn

from .conversion.aliases import declared_aliases
from .errors import DisagreementError
from .fence import Operation
from .sources.base import Source
from .spec import TensorSpec
from .walk import CHUNK_BYTES

__all__ = ["tied_names"]


def tied_names(
    source: Source, origins: Mapping[str, TensorSpec | None], twin: nn.Module | None, operation: Operation
) -> tuple[dict[str, str], list[str]]:
    """Find the names under which a checkpoint stores a tied tensor once more. Collective; each rank compares a part.

    Args:
        source: The checkpoint.
        origins: The names that can be exported, and the tensors that they are; None for what is made of others.
        twin: The model of its config, which declares ties; None if there is none.
        operation: The fence's operation.

    Returns:
        Each name to leave out with the name that stands for it, and the names that should be tied and differ.

    Raises:
        DisagreementError: The ranks' configs, or their versions of transformers, declare different ties.
        SourceError: The tensors cannot be read.
    """
    declared = declared_aliases(twin, origins)
    part, parts = source.ranks.index(source.rank), len(source.ranks)
    equal = [_are_equal(source, origins[alias], origins[kept], part, parts) for alias, kept in declared.items()]
    everyones = operation.agree(json.dumps([list(declared.items()), equal]))
    ties, verdicts = zip(*map(json.loads, everyones), strict=True)
    if any(theirs != ties[0] for theirs in ties):
        raise DisagreementError(
            "the ranks find different tied weights",
            found="; ".join(f"rank {rank}: {dict(theirs)}" for rank, theirs in zip(source.ranks, ties, strict=True)),
            fix="Use the same transformers and the same --base-model on every host",
        )
    differing = {alias for alias, *theirs in zip(declared, *verdicts, strict=True) if not all(theirs)}
    return {alias: kept for alias, kept in declared.items() if alias not in differing}, sorted(differing)


def _are_equal(source: Source, one: TensorSpec | None, other: TensorSpec | None, part: int, parts: int) -> bool:
    """Compare every so many-th chunk of two tensors, byte by byte. What is made of others counts as different."""
    if one is None or other is None:
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = max(CHUNK_BYTES // max(one.row_bytes, 1), 1)
    return all(
        torch.equal(_bytes(source, one, first, rows), _bytes(source, other, first, rows))
        for first in range(part * rows, one.num_rows, parts * rows)
    )


def _bytes(source: Source, spec: TensorSpec, first: int, rows: int) -> torch.Tensor:
    return source.rows(spec, first, min(first + rows, spec.num_rows)).contiguous().reshape(-1).view(torch.uint8)
