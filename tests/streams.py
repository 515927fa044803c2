"""Streams of a device that is not there: all that is queued on one has happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["DeviceModule", "Stream"]


class Stream:
    """Stands in for a stream. Only the module enters it: one that is entered by itself is for one thread only.

    Attributes:
        device: Where it is.
        waits_for: The streams that it was told to wait for.
    """

    def __init__(self, device: object = None) -> None:
        self.device, self.waits_for = device, list[Stream]()

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)


class DeviceModule:
    """Stands in for `torch.cuda`, for as long as a test lasts.

    Attributes:
        default: The default stream.
        current: Streams that have been entered and not been left, the current one last.
        entered: All streams that were entered.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.Stream = Stream
        self.default, self.current, self.entered = Stream(), [Stream()], list[Stream]()
        monkeypatch.setattr(torch, "get_device_module", lambda _: self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.entered.append(stream)
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def current_stream(self, _: object) -> Stream:
        return self.current[-1]

    def default_stream(self, _: object) -> Stream:
        return self.default
