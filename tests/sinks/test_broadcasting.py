"""What a sink does whose servers have been told of a bucket, when the update fails elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import shard, tiny
from ranks import run_ranks

from fsdp_export import Exporter
from fsdp_export.errors import ExportError
from fsdp_export.sinks.broadcasting import BroadcastSink
from fsdp_export.steps import Piece
from fsdp_export.transfer.buckets import Bucket
from fsdp_export.transfer.servers import Pending, Server


class Unanswered(BroadcastSink):
    """Sends to a server that takes a bucket and never answers; rank 1 fails meanwhile."""

    def __init__(self) -> None:
        super().__init__(bucket_bytes=1, timeout=3600)
        self._servers = [Server("http://nowhere:1", 1)]
        self.num_announced = 0

    def write(self, piece: Piece) -> None:
        super().write(piece)
        if dist.get_rank() == 1 and piece.info.name == "two_rows":
            raise ValueError("out of luck")

    def _announce(self, bucket: Bucket) -> Pending[Any]:
        self.num_announced += 1
        return Pending(self._servers, lambda _: threading.Event().wait())

    def _broadcast(self, buffer: torch.Tensor, check: Callable[[], None]) -> None:
        check()

    def _outcome(self) -> None:
        return None


def test_a_bucket_that_is_under_way_is_waited_for_only_a_while(monkeypatch):
    monkeypatch.setattr("fsdp_export.sinks.broadcasting._GRACE_SECONDS", 0.2)

    def check() -> tuple[int, list[str]]:
        sink = Unanswered()
        with pytest.raises(ExportError, match=r"rank 1 .*: ValueError: out of luck"):
            Exporter(shard(tiny(), "1d", 2)).send(sink)
        return sink.num_announced, [each.name for each in threading.enumerate() if "send" in each.name]

    assert run_ranks(check, 2) == [(1, []), (0, [])]
