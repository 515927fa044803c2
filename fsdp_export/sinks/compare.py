"""Compares what an export delivers with another checkpoint: the same walk, whose pieces go against the other's rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..plan import Plan
from ..spec import TensorInfo
from ..steps import Piece
from ..table import dtype_name
from ..verification import Comparison, Difference
from .base import Delivery, Sink
from .compare_values import values_that_differ
from .pairing import Pairs, Tie, pair

__all__ = ["MAX_DIFFERENCES", "CompareSink", "Differences", "Other", "difference_from"]

MAX_DIFFERENCES = 20
"""How many differences are told."""

# Memory of this size is used again and again, where larger ones are new, zeroed pages every time.
_CHUNK_BYTES = 4 << 20


class Other(Protocol):
    """A checkpoint that is compared with, read row by row.

    Attributes:
        specs: Its tensors.
        is_concurrent: Whether rows may be asked for by several threads at once.
    """

    @property
    def specs(self) -> Sequence[TensorInfo]:
        """See above."""
        ...

    @property
    def is_concurrent(self) -> bool:
        """See above."""
        ...

    def rows(self, spec: Any, first: int, stop: int) -> torch.Tensor:
        """Return rows of one of its tensors."""
        ...

    def file_of(self, name: str) -> Path:
        """Return the file that has a tensor, or the folder."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


@dataclass(frozen=True, slots=True)
class Differences:
    """What all ranks found.

    Attributes:
        num_differing: Number of tensors that differ, are missing or are unexpected.
        first: How the first of them do.
        largest: The largest absolute difference of two values.
    """

    num_differing: int
    first: list[Difference]
    largest: float


class CompareSink(Sink):
    """Compares every piece with the rows that another checkpoint has of it, byte by byte. Writes nothing.

    A difference is no error, so that all of them are found: ask `card` for this rank's, and `comparison` for
    everyone's. Pieces may come from several threads.

    Args:
        folder: The other checkpoint.
        open_other: Opens it; called on every rank.
        ties: Pairs of names that are one tensor, of which either checkpoint may have either.
    """

    delivery: Delivery = "once"

    def __init__(self, folder: Path, open_other: Callable[[], Other], ties: Sequence[Tie] = ()) -> None:
        self.folder, self.is_concurrent = folder, True
        self._open_other, self._ties = open_other, ties
        self._other: Other | None = None
        self._plan: Plan | None = None
        self._pairs = Pairs()
        # By the name, and whether it is about values.
        self._differences: dict[tuple[str, bool], Difference] = {}
        self._lock = threading.Lock()

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Open the other checkpoint and compare names, shapes and dtypes; see `Sink.open`."""
        self._other = self._open_other()
        self.is_concurrent = self._other.is_concurrent
        self._plan, self._differences = plan, {}
        self._pairs = pair(plan.outputs, self._other.specs, self._ties)
        for output in self._pairs.missing:
            self._add(Difference("missing", output.name, str(self.folder), expected=_describe(output)))
        for output in plan.outputs:
            pairs = self._pairs.others.get(output.name, [])
            self._pairs.others[output.name] = [pair for pair in pairs if self._is_comparable(output, *pair)]
        for spec in self._pairs.unexpected:
            self._add(Difference("unexpected", spec.name, self._file(spec.name), found=_describe(spec)))

    def write(self, piece: Piece) -> None:
        """Compare rows; see `Sink.write`."""
        info = piece.info
        others = self._pairs.others.get(info.name)
        if not others:
            return
        expected = piece.tensor.detach().cpu().contiguous()
        rows = max(_CHUNK_BYTES // max(info.row_bytes, 1), 1)
        for first in range(0, expected.shape[0], rows) if info.shape else (0,):
            part = expected[first : first + rows] if info.shape else expected
            for name, spec in others:
                self._compare(name, spec, piece.first_row + first, part)

    def close(self) -> None:
        """Close the other checkpoint."""
        if self._other is not None:
            self._other.close()
            self._other = None

    def abort(self) -> None:
        """Close the other checkpoint."""
        self.close()

    def card(self) -> str:
        """Return what this rank found, for `comparison`; empty if all was equal."""
        return json.dumps(self.facts()) if self._differences else ""

    def comparison(self, cards: Sequence[str], seconds: float, source: Path | None = None) -> Comparison:
        """Join what all ranks found.

        Args:
            cards: What `card` returned on each of them.
            seconds: How long it took.
            source: Where the pieces came from.
        """
        assert self._plan is not None
        found = self.joined([json.loads(card) for card in cards if card])
        return Comparison(
            self.folder,
            len(self._plan.outputs),
            self._plan.num_bytes,
            seconds,
            found.num_differing,
            found.first,
            source=source,
            num_tied=len({name for name, _ in self._ties}),
            largest=found.largest,
        )

    def facts(self) -> dict[str, Any]:
        """Return what this rank found in tensors, as JSON values for `joined`."""
        assert self._plan is not None
        differing = {name for name, _ in self._differences}
        outputs = [output.name for output in self._plan.outputs]
        unexpected = {spec.name for spec in self._pairs.unexpected}
        keys = sorted(self._differences, key=self._order(outputs))[:MAX_DIFFERENCES]
        return {
            "differing": "".join("01"[name in differing] for name in outputs),
            # Every rank sees the same names, and all of them may be unexpected; those of ties are few.
            "num_unexpected": len(unexpected),
            "tied": sorted(differing - unexpected - set(outputs)),
            "found": [asdict(self._differences[key]) for key in keys],
            "largest": max((difference.largest for difference in self._differences.values()), default=0.0),
        }

    def joined(self, facts: Sequence[dict[str, Any]]) -> Differences:
        """Join what ranks found in tensors."""
        assert self._plan is not None
        outputs = [output.name for output in self._plan.outputs]
        differing = {name for each in facts for name, bit in zip(outputs, each["differing"], strict=True) if bit == "1"}
        differing |= {name for each in facts for name in each["tied"]}
        joined: dict[tuple[str, bool], Difference] = {}
        for difference in (difference_from(fields) for each in facts for fields in each["found"]):
            key = _key(difference)
            joined[key] = joined[key].joined(difference) if key in joined else difference
        keys = sorted(joined, key=self._order(outputs))[:MAX_DIFFERENCES]
        return Differences(
            len(differing) + max((each["num_unexpected"] for each in facts), default=0),
            [joined[key] for key in keys],
            max((each["largest"] for each in facts), default=0.0),
        )

    def _order(self, outputs: Sequence[str]) -> Callable[[tuple[str, bool]], tuple[int, bool]]:
        """Return a sort key that puts differences into the order of the checkpoint."""
        names = dict.fromkeys([*outputs, *(name for name, _ in self._differences)])
        position = {name: index for index, name in enumerate(names)}
        return lambda key: (position.get(key[0], len(position)), key[1])

    def _is_comparable(self, output: TensorInfo, name: str, spec: TensorInfo) -> bool:
        """Compare what the checkpoints say of a tensor; one of another shape is not read."""
        if (spec.shape, spec.dtype) != (output.shape, output.dtype):
            kind = "shape" if spec.shape != output.shape else "dtype"
            self._add(Difference(kind, name, self._file(spec.name), _describe(output), _describe(spec)))
        return spec.shape == output.shape

    def _compare(self, name: str, spec: TensorInfo, first: int, expected: torch.Tensor) -> None:
        """Compare rows from `first` on with those of the other checkpoint."""
        found = self._read(spec, first, first + (expected.shape[0] if spec.shape else 1))
        if found is None:
            return
        values = values_that_differ(spec.shape, first, expected, found)
        if values is not None:
            self._add(Difference("values", name, self._file(spec.name), **values))

    def _read(self, spec: TensorInfo, first: int, stop: int) -> torch.Tensor | None:
        assert self._other is not None
        return self._other.rows(spec, first, stop)

    def _file(self, name: str) -> str:
        assert self._other is not None
        return str(self._other.file_of(name))

    def _add(self, difference: Difference) -> None:
        key = _key(difference)
        with self._lock:
            known = self._differences.get(key)
            self._differences[key] = difference if known is None else known.joined(difference)


def difference_from(fields: dict[str, Any]) -> Difference:
    """Return a difference as another rank found it."""
    return Difference(**{**fields, "index": tuple(fields["index"])})


def _key(difference: Difference) -> tuple[str, bool]:
    return difference.name, difference.kind not in {"missing", "unexpected", "shape", "dtype"}


def _describe(info: TensorInfo) -> str:
    return f"{list(info.shape)} {dtype_name(info.dtype)}"
