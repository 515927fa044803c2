"""How rows of a tensor differ from those that were expected: byte by byte, or by value where the dtypes differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..memory import bytes_of

__all__ = ["values_that_differ"]

_BLOCK_ELEMENTS = 1 << 18
_WORD_BYTES = 8
_HALF_RANGE = 2.0**62
_HALVES = (torch.bfloat16, torch.float16)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def values_that_differ(
    shape: Sequence[int], first_row: int, expected: torch.Tensor, found: torch.Tensor
) -> dict[str, Any] | None:
    """Tell how rows differ, block by block.

    Of one dtype, bytes count: a NaN equals itself, a zero is not the negative one. Else values do: integers as int64,
    all other ones in float64, where one NaN is as good as another.

    Args:
        shape: The shape of the tensor.
        first_row: Where in dim 0 the rows begin.
        expected: The rows that should be there.
        found: Those that are.

    Returns:
        What a `Difference` says of values; None if there is none, or if values cannot be compared.
    """
    if expected.dtype == found.dtype and _are_equal(expected, found):
        return None
    expected, found = expected.reshape(-1), found.reshape(-1)
    first, num_differing, largest = -1, 0, 0.0
    for begin, one, other in _blocks(expected, found):
        try:
            differs = _differs(one, other)
        except RuntimeError:  # of a dtype that cannot be converted
            return None
        count = int(differs.sum())
        if count:
            first = begin + int(differs.to(torch.uint8).argmax()) if first < 0 else first
            num_differing += count
            largest = max(largest, _largest(one, other, differs))
    if not num_differing:
        return None
    return {
        "expected": _text(expected[first]),
        "found": _text(found[first]),
        "index": _index(shape, first_row * math.prod(shape[1:]) + first),
        "num_differing": num_differing,
        "num_values": math.prod(shape),
        "largest": largest,
    }


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = bytes_of(one), bytes_of(other)
    if not (one.storage_offset() % _WORD_BYTES or other.storage_offset() % _WORD_BYTES):
        # Six times as fast as byte by byte.
        whole = one.numel() // _WORD_BYTES * _WORD_BYTES
        if not torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64)):
            return False
        one, other = one[whole:], other[whole:]
    return torch.equal(one, other)


def _blocks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for begin in range(0, one.numel(), _BLOCK_ELEMENTS):
        yield begin, one[begin : begin + _BLOCK_ELEMENTS], other[begin : begin + _BLOCK_ELEMENTS]


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements differ."""
    if one.dtype == other.dtype:
        word = _WORDS.get(one.dtype.itemsize)
        if word is not None:
            return torch.ne(one.view(word), other.view(word))
        pair = (bytes_of(each).view(-1, one.dtype.itemsize) for each in (one, other))
        return torch.ne(*pair).any(dim=1)
    if _are_integers(one, other):
        words, others = _as_int64(one), _as_int64(other)
        # Of one sign bit, int64 and uint64 make different numbers.
        return torch.ne(words, others) | (words.lt(0) & (torch.uint64 in {one.dtype, other.dtype}))
    one, other = _widened(one, other)
    return torch.ne(one, other) & ~(one.isnan() & other.isnan())


def _widened(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in a dtype in which they can be compared and subtracted."""
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    return one.to(wide), other.to(wide)


def _are_integers(*tensors: torch.Tensor) -> bool:
    return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers as int64, those of 64 bits as their bits."""
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def _largest(one: torch.Tensor, other: torch.Tensor, differs: torch.Tensor) -> float:
    """Return the largest absolute difference of values; infinite where one of them is no finite number."""
    if one.dtype == other.dtype and one.dtype in _HALVES:
        # Three times as fast; equal ones add nothing, unless they are no finite numbers.
        largest = float(one.to(torch.float32).sub_(other).abs_().max())
        if math.isfinite(largest):
            return largest
    try:
        wide, wide_other = _widened(one, other)
    except RuntimeError:  # of a dtype that cannot be converted
        return math.inf
    apart = (wide - wide_other).abs().to(torch.float64)
    if _are_integers(one, other):  # float64 does not tell large ones apart, and int64 has no room for all differences
        exact = (_as_int64(one) - _as_int64(other)).abs().to(torch.float64)
        return float(torch.where(apart < _HALF_RANGE, exact, apart).max())
    if not math.isfinite(float(apart.max())):
        apart.masked_fill_(~differs, 0).nan_to_num_(nan=math.inf, posinf=math.inf)
    return float(apart.max())


def _text(value: torch.Tensor) -> str:
    try:
        return str(value.item())
    except RuntimeError:  # of a dtype whose elements are several numbers
        return f"0x{bytes(bytes_of(value).tolist()).hex()}"


def _index(shape: Sequence[int], position: int) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))
