"""What a sink is: told the plan first, handed pieces, committed or aborted. The walk knows nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ..plan import Plan
from ..steps import Piece, StoredPiece

__all__ = ["Delivery", "MemorySink", "Sink"]

Delivery = Literal["once", "everyone"]


class Sink:
    """Receives the tensors of one export. To add a transport, subclass it and override what it needs.

    The calls come in this order. Ranks meet between the lines, and an exception on any rank ends the export on all::

        card        every rank        what the first rank must know of this one, a string
        begin       first rank        announce the update; may return a ticket, a string that all ranks get
        open        every rank        connect, open files
        write       every rank        any number of pieces
        close       every rank        all that was written has arrived
        commit      first rank        make it the current version
        abort       every rank        instead of what was left of the above

    Attributes:
        delivery: `"once"`: every row of every tensor is written on exactly one rank, in any order (a rank writes what
            it holds, so nothing is gathered that need not be). `"everyone"`: every tensor is written whole, in the
            same order on every rank, on the device.
        is_concurrent: Whether `write` and `copy` may be called from several threads at once.
        wants_aliases: With `"everyone"`: whether a tied tensor is written once more under each of its other names,
            which `plan.aliases` has, right after that of `plan.outputs`.
        copies_files: Whether `copy` takes rows that lie in files just as they are to be written.
        check: Set before `begin`. Raises if another rank is known to have failed: call it now and then while you wait
            for something; any thread may.
    """

    delivery: Delivery = "everyone"
    is_concurrent: bool = False
    copies_files: bool = False
    wants_aliases: bool = False
    check: Callable[[], None] = staticmethod(lambda: None)

    def card(self) -> str:
        """Return what the first rank must know of this one, such as an address. Called on every rank."""
        return ""

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """Prepare the update. Called on the first rank only.

        Args:
            plan: Names, shapes and dtypes of all outputs; with delivery `"everyone"` in the order in which they come.
            cards: The cards of all ranks, in order.

        Returns:
            The ticket.
        """
        return ""

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Get ready to receive pieces. Called on every rank.

        Args:
            plan: As in `begin`.
            rank: This process's global rank.
            ticket: What `begin` returned on the first rank.
        """

    def write(self, piece: Piece) -> None:
        """Take a piece. Called on every rank that has one.

        With delivery `"everyone"` the tensor is yours to keep; call `record_stream` on it if you read it on another
        stream than the current one. With `"once"` it may be the module's own memory: do not change it, and copy it if
        it is needed after this returns.
        """
        raise NotImplementedError

    def copy(self, piece: StoredPiece) -> None:
        """Take rows from the files they are in, instead of a piece. Called only where `copies_files` says so."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait until all pieces of this rank have arrived. Called on every rank."""

    def commit(self) -> None:
        """Make the update current. Called on the first rank only, once every rank has closed."""

    def abort(self) -> None:
        """Undo as far as possible. Called on every rank, in any state, also after `commit`; must not raise."""


class MemorySink(Sink):
    """Keeps full tensors in host memory: the smallest sink there is, and a handy one in tests.

    Attributes:
        tensors: Name to tensor, on the CPU, of the last export that this rank received whole; every rank has all of
            them, and keeps them if another rank fails after that.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """Forget what an export that failed left."""
        self._pending = {}

    def write(self, piece: Piece) -> None:
        """Copy a full tensor."""
        self._pending[piece.info.name] = piece.tensor.detach().to("cpu", copy=True)

    def close(self) -> None:
        """Show the tensors: every rank has its own copy, so there is nothing to commit together."""
        self.tensors = self._pending

    def abort(self) -> None:
        """Drop what came so far."""
        self._pending = {}
