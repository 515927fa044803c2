"""These tests need packages that the development set lacks: bin/test-peers runs them, one peer at a time."""

import os
from importlib import metadata
from pathlib import Path

import pytest

PEER = os.environ.get("FSDP_EXPORT_PEER", "")
collect_ignore_glob = [] if PEER else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say with which versions the tests ran."""
    if PEER:
        pins = Path(__file__).with_name(f"{PEER}.txt").read_text().splitlines()
        names = (pins[0].partition("==")[0], "torch", "transformers")
        terminalreporter.write_line("with " + ", ".join(f"{name} {metadata.version(name)}" for name in names))
