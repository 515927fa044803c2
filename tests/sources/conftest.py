"""What the tests of all sources that read files share."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of files."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        sizes.append(preadv(descriptor, targets, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes
