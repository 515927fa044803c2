"""Whether the memory of a module can be written to, one tensor beside the other: looked at before a value changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import nn

from ..compat import local_of
from ..conversion.trace import storage_of
from ..errors import SourceError
from .materializing import own_tensors

__all__ = ["check_memory"]

_OWN_MEMORY = "Give the module a tensor of its own there (clone() makes one)"


@torch.no_grad()
def check_memory(
    model: nn.Module, read: Callable[[], Mapping[str, torch.Tensor]]
) -> tuple[list[tuple[str, str]], set[str]]:
    """Refuse tensors of a module that cannot take values of their own.

    Args:
        model: The module.
        read: Returns this rank's blocks by name; some may be on meta, which will get memory.

    Returns:
        Pairs of names that are one and the same memory, so that they can have but the same values; and the names of
        copies of what the module holds.

    Raises:
        SourceError: The elements of one share memory, or it shares some with another.
    """
    locals_ = read()
    known = {storage_of(local_of(tensor)) for _, _, _, tensor in own_tensors(model)}
    # What is no parameter and no buffer may still be kept somewhere; a copy is another one every time.
    is_own = all(storage_of(local) in known for local in locals_.values() if local.numel())
    again = locals_ if is_own else read()
    by_storage: dict[int, list[str]] = defaultdict(list)
    copies = set()
    for name, local in locals_.items():
        if not local.numel():
            continue
        if storage_of(local) != storage_of(again[name]):
            copies.add(name)
            continue
        if local.is_meta:
            continue
        if _may_overlap(local) and _overlaps(local):
            found = f"shape {list(local.shape)} with strides {list(local.stride())}"
            raise SourceError("elements that share memory", name=name, found=found, fix=_OWN_MEMORY)
        by_storage[storage_of(local)].append(name)
    several = [names for names in by_storage.values() if len(names) > 1]
    return [pair for names in several for pair in _shared({name: locals_[name] for name in names})], copies


def _shared(views: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return those views of one storage that are the same view; others must not meet."""
    first: dict[object, str] = {}
    pairs = []
    for name, view in views.items():
        form = (view.storage_offset(), view.shape, view.stride(), view.dtype)
        if first.setdefault(form, name) != name:
            pairs.append((first[form], name))
    distinct = sorted(first.values(), key=lambda name: _span(views[name]))
    spans = [_span(views[name]) for name in distinct]
    if any(span[0] < other[1] for other, span in pairwise(spans)):
        _check_apart({name: views[name] for name in distinct}, max(stop for _, stop in spans))
    return pairs


def _check_apart(views: Mapping[str, torch.Tensor], num_bytes: int) -> None:
    """Refuse views of one storage that have a byte in common. Columns of one matrix have none."""
    taken = torch.zeros(num_bytes, dtype=torch.bool, device="cpu")
    for name, view in views.items():
        place = _place(taken, view)
        if place.any():
            other = next(other for other in views if other != name and _meet(view, views[other], num_bytes))
            found = f"some that {other!r} has, too"
            raise SourceError("memory of two tensors", name=name, found=found, fix=_OWN_MEMORY)
        place.fill_(1)


def _meet(one: torch.Tensor, other: torch.Tensor, num_bytes: int) -> bool:
    taken = torch.zeros(num_bytes, dtype=torch.bool, device="cpu")
    _place(taken, one).fill_(1)
    return bool(_place(taken, other).any())


def _place(taken: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the marks of a view's bytes, of those that there is one for every byte of the storage."""
    strides = (stride * view.itemsize for stride in view.stride())
    return taken.as_strided((*view.shape, view.itemsize), (*strides, 1), view.storage_offset() * view.itemsize)


def _span(view: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage the bytes of a view begin and end."""
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    begin = int(view.storage_offset())
    return begin * view.itemsize, (begin + last + 1) * view.itemsize


def _may_overlap(view: torch.Tensor) -> bool:
    """Tell whether two elements may be in one place: if some dim steps less far than the ones within it reach."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(view.shape, view.stride(), strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def _overlaps(view: torch.Tensor) -> bool:
    if any(size > 1 and not stride for size, stride in zip(view.shape, view.stride(), strict=True)):
        return True
    begin, stop = (edge // view.itemsize for edge in _span(view))
    taken = torch.zeros(stop - begin, dtype=torch.bool, device="cpu")
    taken.as_strided(view.shape, view.stride()).fill_(1)
    return int(taken.sum()) < view.numel()
