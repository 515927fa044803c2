"""Threads that share the work of one rank."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["do_all"]

_T = TypeVar("_T")


def do_all(do: Callable[[_T], object], items: Iterable[_T], *, most: int, name: str) -> None:
    """Do something with all items, which are taken as threads become free; after the first that fails none is begun.

    Each thread lets torch use no more threads; torch takes that for the default of all to come, which is put back.

    Args:
        do: What to do with an item.
        items: The items.
        most: How many threads there may be.
        name: What their names begin with.

    Raises:
        Exception: What `do` raised first.
    """
    num_threads = min(len(os.sched_getaffinity(0)), most)
    pending: deque[Future[object]] = deque()
    try:
        with ThreadPoolExecutor(num_threads, name, torch.set_num_threads, (1,)) as threads:
            try:
                for item in items:
                    pending.append(threads.submit(do, item))
                    if len(pending) > 2 * most:
                        pending.popleft().result()
                while pending:
                    pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()
    finally:
        torch.set_num_threads(torch.get_num_threads())
