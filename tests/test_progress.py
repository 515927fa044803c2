"""A bar on a terminal, plain lines elsewhere, nothing when it is not wanted."""

import fcntl
import io
import os
import select
import struct
import termios
from contextlib import closing, redirect_stderr

import pytest

from fsdp_export import progress
from fsdp_export.progress import Progress


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    return monkeypatch


class Terminal:
    """A terminal that is not looked at yet."""

    def __init__(self):
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")

    def read(self):
        """Return what came since the last time."""
        self.stream.flush()
        data = b""
        # The kernel passes it on a moment later.
        while select.select([self._ours], [], [], 0.1)[0]:
            data += os.read(self._ours, 1 << 16)
        return data.decode()

    def close(self):
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal():
    with closing(Terminal()) as terminal:
        yield terminal


@pytest.fixture
def log(monkeypatch):
    """A file, in which every call is to leave a line."""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    return io.StringIO()


def test_a_bar_in_bytes_of_all_ranks_on_a_terminal(terminal, environ):
    environ.setenv("NO_COLOR", "1")
    with redirect_stderr(terminal.stream), Progress(4_000_000, 2) as show:
        assert "0.00/4.00M" in terminal.read()
        show(1_000_000)
        show._bar.refresh()
        text = terminal.read()
        assert "writing:  50%" in text
        assert "2.00M/4.00M" in text
        show(1_500_000)
        text = terminal.read()
        # An uneven share shows as one that is done, never as more than everything.
        assert "waiting for the disk: 100%" in text
        assert "4.00M/4.00M" in text
        assert "\x1b[" not in text
    assert terminal.read().endswith("\r")


def test_plain_lines_elsewhere(log):
    with redirect_stderr(log), Progress(4_000_000, 2) as show:
        show(500_000)
        show(1_500_000)
    assert log.getvalue().splitlines() == ["writing: 1 MB of 4 MB after 0 s", "writing: 4 MB of 4 MB after 0 s"]


def test_few_lines_for_many_pieces(log, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 10.0)
    with redirect_stderr(log), Progress(1000) as show:
        for _ in range(1000):
            show(1)
    assert log.getvalue() == ""


@pytest.mark.parametrize("value", ["1", "ON", "yes", "True"])
def test_the_hubs_variable_silences_both(value, environ, terminal):
    environ.setenv("HF_HUB_DISABLE_PROGRESS_BARS", value)
    environ.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    with redirect_stderr(terminal.stream), Progress(1000) as show:
        show(1000)
    assert terminal.read() == ""


@pytest.mark.parametrize("value", ["0", "", "off"])
def test_the_hubs_variable_may_say_no(value, environ, log):
    environ.setenv("HF_HUB_DISABLE_PROGRESS_BARS", value)
    with redirect_stderr(log), Progress(1000) as show:
        show(1000)
    assert log.getvalue() == "writing: 1 kB of 1 kB after 0 s\n"


def test_quiet_is_quiet(log):
    with redirect_stderr(log), Progress(1000, quiet=True) as show:
        show(1000)
    assert log.getvalue() == ""


def test_an_error_takes_the_bar_away(terminal):
    def fail():
        with redirect_stderr(terminal.stream), Progress(1000) as show:
            show(10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert terminal.read().endswith("\r")


def test_an_empty_export_has_a_bar_too(terminal):
    with redirect_stderr(terminal.stream), Progress(0) as show:
        show(0)
    assert terminal.read().endswith("\r")
