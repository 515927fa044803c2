"""Imports run downwards: a wing knows those below it, and no file the ones above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import fsdp_export

PACKAGE = Path(fsdp_export.__file__).parent
# From the ground up. What stands beside them in the package belongs to no wing.
WINGS = ("fence", "publish", "sources", "conversion", "sidecars", "transfer", "sinks")


def _imports(file: Path) -> Iterator[Path]:
    """Yield the files of the package that a file imports when it is loaded, or when something in it runs."""
    folder = file.parent
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [folder, *folder.parents][node.level - 1].joinpath(*(node.module or "").split("."))
            for name in [base, *(base / alias.name for alias in node.names)]:
                yield from (path for path in (name.with_suffix(".py"), name / "__init__.py") if path.is_file())


GRAPH = {file: set(_imports(file)) - {file} for file in PACKAGE.rglob("*.py")}


def test_no_files_import_each_other_in_a_circle():
    files = {file: imported for file, imported in GRAPH.items() if file.name != "__init__.py"}
    assert len(list(TopologicalSorter(files).static_order())) >= len(files)


def test_imports_are_found():
    assert PACKAGE / "conversion" / "twin.py" in GRAPH[PACKAGE / "sidecars" / "of_model.py"]
    assert PACKAGE / "walk.py" in GRAPH[PACKAGE / "exporter.py"]


def test_a_wing_imports_from_lower_ones_only():
    upwards = [
        (str(file.relative_to(PACKAGE)), str(other.relative_to(PACKAGE)))
        for file, imported in GRAPH.items()
        for other in imported
        if (mine := file.relative_to(PACKAGE).parts[0]) in WINGS
        and (theirs := other.relative_to(PACKAGE).parts[0]) in WINGS
        and WINGS.index(mine) < WINGS.index(theirs)
    ]
    assert upwards == []


def test_no_wing_knows_what_puts_them_together():
    above = {
        "exporter.py",
        "planning.py",
        "walk.py",
        "lockstep.py",
        "checkpoint.py",
        "opening.py",
        "api.py",
        "cli.py",
        "demo.py",
    }
    known = {
        (str(file.relative_to(PACKAGE)), other.name)
        for file, imported in GRAPH.items()
        for other in imported
        if file.relative_to(PACKAGE).parts[0] in WINGS and other.parent == PACKAGE and other.name in above
    }
    assert known == set()
