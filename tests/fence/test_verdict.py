from __future__ import annotations

import pytest

from fsdp_export import errors
from fsdp_export.errors import ExportError, SinkError, UnsafeInputError
from fsdp_export.fence.verdict import SILENT, Report, Roster, to_error

HOSTS = Roster(ranks=(4, 5, 6, 7), hosts=("a", "a", "b", "b"))
EIGHT = Roster(ranks=tuple(range(8)), hosts=tuple("abcdefgh"))


class _PrivateError(UnsafeInputError):
    def __init__(self, line: int, column: int) -> None:
        super().__init__(f"at {line}:{column}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        pytest.param(
            SinkError("disk full", file="x", fix="Free some"), "SinkError", "disk full in x. Free some.", id="ours"
        ),
        pytest.param(_PrivateError(3, 4), "UnsafeInputError", "at 3:4", id="a-private-leaf-is-its-public-base"),
        pytest.param(OSError(28, "No space"), "RankError", "OSError: [Errno 28] No space", id="another-exception"),
        pytest.param(KeyboardInterrupt(), "RankError", "interrupted by KeyboardInterrupt", id="ctrl-c"),
        pytest.param(SystemExit(3), "RankError", "interrupted by SystemExit", id="exit"),
        pytest.param(GeneratorExit(), "RankError", "stopped early", id="generator-closed"),
    ],
)
def test_report_of_an_exception(error: BaseException, kind: str, text: str) -> None:
    report = Report.of(2, error)
    assert report == (2, kind, text)
    assert report.is_error


@pytest.mark.parametrize(
    ("roster", "reports", "expected"),
    [
        pytest.param(HOSTS, [(2, "no")], "rank 6 (b): no", id="one"),
        pytest.param(HOSTS, [(1, "no"), (2, "no")], "ranks 5, 6 (hosts a, b): no", id="two-hosts"),
        pytest.param(HOSTS, [(3, "no"), (2, "no")], "ranks 6, 7 (host b): no", id="one-host-for-both"),
        pytest.param(HOSTS, [(3, "x"), (1, "y")], "rank 5 (a): y (and 1 more rank failed)", id="first-in-order"),
        pytest.param(
            HOSTS, [(0, "x"), (1, "y"), (2, "z")], "rank 4 (a): x (and 2 more ranks failed)", id="different-messages"
        ),
        pytest.param(
            HOSTS, [(0, "x"), (1, "y"), (3, "x")], "ranks 4, 7 (hosts a, b): x (and 1 more rank failed)", id="both"
        ),
        pytest.param(HOSTS, [(place, "no") for place in range(4)], "no", id="every-rank-the-same"),
        pytest.param(HOSTS._replace(hosts=()), [(1, "no")], "rank 5: no", id="host-unknown"),
        pytest.param(
            EIGHT,
            [(place, "no") for place in range(7)],
            "ranks 0, 1, 2, 3, 4 and 2 more (hosts a, b, c, d, e and 2 more): no",
            id="many",
        ),
    ],
)
def test_verdict_joins_what_ranks_report(roster: Roster, reports: list[tuple[int, str]], expected: str) -> None:
    assert roster.verdict([Report(place, "SinkError", text) for place, text in reports]) == ("SinkError", expected)


def test_a_dead_rank_comes_before_those_that_failed_of_it() -> None:
    reports = [Report(0, "RankError", "Connection closed"), Report(3, SILENT, "no sign of life")]
    assert HOSTS.verdict(reports) == (SILENT, "rank 7 (b): no sign of life (and 1 more rank failed)")


@pytest.mark.parametrize("name", [name for name in errors.__all__ if isinstance(getattr(errors, name), type)])
def test_every_error_of_the_package_is_raised_as_itself(name: str) -> None:
    error = to_error(*Report.of(0, getattr(errors, name)("why"))[1:])
    assert type(error) is getattr(errors, name)
    assert isinstance(error, ExportError)
    assert str(error) == "why"


def test_silence_is_a_rank_error() -> None:
    assert type(to_error(SILENT, "why")) is errors.RankError
