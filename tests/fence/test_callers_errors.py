"""What the caller was handling when an export began, or when it left one, stays as it is."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator

import pytest

from fsdp_export.fence import Fence


def yielding(fence: Fence) -> Generator[int, None, None]:
    with fence.operation("test"):
        yield 1


def lookup(key: str) -> None:
    raise KeyError(key)


def test_a_caller_keeps_its_own_error_and_the_generator_that_caught_it() -> None:
    caught: list[KeyError] = []

    def generator() -> Iterator[int]:
        try:
            lookup("own")
        except KeyError as error:
            caught.append(error)
        yield 1
        yield 2

    own = generator()
    next(own)
    fence = Fence([0], 0)
    before = yielding(fence)
    next(before)
    try:
        raise caught[0]
    except KeyError as error:
        before.close()
        with pytest.raises(KeyError, match="inner"), fence.operation("test"):
            lookup("inner")
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        assert frame.f_locals == {"key": "own"}
    assert next(own) == 2
