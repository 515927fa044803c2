"""Print the needs of a pyproject.toml that the running Python lacks, as pip takes them; import none of them."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - whatever python3 is on PATH is asked
    sys.exit("Python 3.10 or newer is needed")

import importlib.metadata
import importlib.util
import re
from pathlib import Path


def main() -> None:
    """Read the dependencies of the file that the command line names and print those that are not met."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block, f"no dependencies in {sys.argv[1]}"
    print(*(need for need in re.findall(r'"(.+?)"', block[1]) if not _is_met(need)))


def _is_met(need: str) -> bool:
    name = re.split("[<>]", need)[0]
    if importlib.util.find_spec(name) is None:
        return False
    try:
        found = _release(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return True  # importable without having been installed: on PYTHONPATH
    return all(
        found >= _release(version) if operator == ">=" else found < _release(version)
        for operator, version in re.findall(r"(>=|<)([\d.]+)", need)
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


main()
