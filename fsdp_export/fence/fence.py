"""What an exporter holds: the ranks it exports with, and the way into an operation with them."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence

from torch.distributed.distributed_c10d import Store

from ..compat import default_store
from ..errors import UsageError
from .board import Link, Turn
from .operation import Operation, SharedOperation
from .verdict import Roster

__all__ = ["Fence"]


class Fence:
    """Agreement among the ranks that export together; free where there is only one.

    Args:
        ranks: The global ranks that export together, in order. The first is called rank 0 here.
        rank: This process's global rank.
        store: A store that all of them reach; None is the default process group's.
        timeout: Seconds to wait for ranks that have not called. Nothing else is ever timed out.
        is_background: Whether its operations run on a thread beside those of other fences of the same ranks, and may
            outlive the process group. They are numbered by themselves, poll more rarely, and keep the store.

    Attributes:
        index: Where this process stands among the ranks.
        size: How many ranks there are.
        is_lead: Whether this process is rank 0.

    Raises:
        UsageError: This process is not one of the ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        store: Store | None = None,
        timeout: float = 600.0,
        is_background: bool = False,
    ) -> None:
        if rank not in ranks:
            everyone = Roster(ranks).name(range(len(ranks)))
            raise UsageError("this process takes no part", expected=f"one of {everyone}", found=f"rank {rank}")
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self.is_lead = self.index == 0
        self._link = None
        if self.size > 1:
            store = default_store() if store is None else store
            self._link = Link(ranks, self.index, store, timeout, is_background=is_background)
        self._turn = self._link.turn if self._link is not None else Turn()

    @contextlib.contextmanager
    def operation(self, what: str) -> Iterator[Operation]:
        """Enter an operation with all ranks, and leave it with them.

        Collective: every rank of the fence must call this in the same order.

        Args:
            what: The call that the user makes, for messages; the same on every rank.

        Yields:
            The operation. An exception in the body on one rank becomes an error on every rank.

        Raises:
            ExportError: A rank failed with an error of this package; the same class on every rank.
            RankError: A rank failed with another exception, was interrupted, died or never called.
            DisagreementError: The ranks call different things.
            UsageError: This process is within an operation of the same ranks already, of this fence or another one.
        """
        if self._turn.is_taken:
            raise UsageError(f"{what} was called within another export of the same ranks", fix="Finish that one first")
        earlier = {id(error) for error in _causes(sys.exc_info()[1])}
        try:
            self._turn.is_taken = True
            if self._link is None:
                yield Operation()
                return
            with contextlib.closing(SharedOperation(self._link, what, self._link.next_number(what))) as operation:
                try:
                    operation.enter()
                    yield operation
                    operation.end()
                except BaseException as error:  # noqa: BLE001 - it is raised again, once the other ranks know of it
                    operation.fail(error)
        except BaseException as error:
            _clear_frames(error, earlier)
            raise
        finally:
            self._turn.is_taken = False


def _clear_frames(error: BaseException, earlier: Collection[int]) -> None:
    """Forget the variables of what has ended with an error, such as buckets on the device; the traceback stays.

    Whoever keeps the error would keep them, as does the error itself where they lead back to it. What the caller was
    handling before, or as it left, is its own: a generator of its own that has caught that would end.
    """
    for cause in _causes(error, earlier):
        traceback.clear_frames(cause.__traceback__)


def _causes(error: BaseException | None, without: Collection[int] = ()) -> list[BaseException]:
    """Return an error and what led to it, up to what is left out, or to a generator that was closed."""
    found: dict[int, BaseException] = {}
    causes = [error]
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in found or id(cause) in without or isinstance(cause, GeneratorExit):
            continue
        found[id(cause)] = cause
        causes += [cause.__cause__, cause.__context__]
    return list(found.values())
