"""Which tensors are alive, and of how many bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made within it that are alive.

    Attributes:
        peak: The most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensors_alive() -> list[torch.Tensor]:
    """Return the tensors that Python has an object of; parameters are left out."""
    return [each for each in gc.get_objects() if type(each) is torch.Tensor]


def left_over(before: Collection[int]) -> list[torch.Size]:
    """Return the shapes of tensors that were made since, by their `id` before, and stay without a collection.

    A thread of gloo may have those of its last collective for a moment longer.
    """
    deadline = time.monotonic() + 30
    while (left := [each.shape for each in tensors_alive() if id(each) not in before]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
