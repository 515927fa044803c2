"""Code of a model's own, which `auto_map` names: files of a folder, or of live classes. It is copied, and not run."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..paths import is_file, read_file

__all__ = ["code_files", "code_of_class", "missing_code"]

_MAX_CODE_BYTES = 4 << 20


def code_files(folder: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the Python files that a config names in `auto_map`, and those that these import from beside them."""
    return _with_imports(folder, _modules(config.get("auto_map")))


def missing_code(config: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return the files that a config names in `auto_map` and that are not present."""
    return sorted({f"{module}.py" for module in _modules(config.get("auto_map"))} - present.keys())


def code_of_class(cls: type) -> tuple[str, dict[str, Path]] | None:
    """Return how `auto_map` refers to a class, and the files that have its code.

    Returns:
        None where no file has it at its top, or it is of the main program, which nobody can import.
    """
    if "." in cls.__qualname__:
        return None
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or cls.__module__ == "__main__" or not is_file(Path(file)) or not file.endswith(".py"):
        return None
    path = Path(file)
    return f"{path.stem}.{cls.__name__}", _with_imports(path.parent, [path.stem])


def _with_imports(folder: Path, modules: Iterator[str] | list[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        path = folder / name
        if name not in files and is_file(path):
            files[name] = path
            waiting += _imports_beside(path)
    return dict(sorted(files.items()))


def _modules(auto_map: object) -> Iterator[str]:
    """Yield the modules that an `auto_map` names; those of other repositories (`id--module.Class`) are left there."""
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    for value in values:
        for reference in value if isinstance(value, list | tuple) else [value]:
            module = re.fullmatch(r"(\w+)\.\w+", str(reference))
            if module and not module[1].startswith("_fsdp_"):
                yield module[1]


def _imports_beside(path: Path) -> Iterator[str]:
    """Yield the modules that a Python file imports from its own folder, by reading it."""
    try:
        tree = ast.parse(read_file(path, _MAX_CODE_BYTES))
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]
