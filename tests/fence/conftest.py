from __future__ import annotations

import pytest

from fsdp_export.fence import board, heartbeat, operation


@pytest.fixture(autouse=True)
def _hasty_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what takes seconds; forked ranks inherit it."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT_BEATS", 16)
    monkeypatch.setattr(operation, "PATIENCE_SECONDS", 1.6)
    monkeypatch.setattr(board, "WARNING_SECONDS", 0.3)
