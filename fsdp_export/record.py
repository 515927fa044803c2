"""The record of an export: a small JSON beside the weights that tells what they were made from, and by what.

No loader needs it. A later export takes from it which files it may replace, and a verification what else there is than
tensors. It says nothing of the time and of places on a machine, so that the same export makes the same record.

Schema 2 has for every file an object: `bytes`; `tensors` of weights; `sha256` and the origin (`from`, `at`, `revision`,
`made_of`, `changed`) of others. Schema 1, which did not name itself, had the bytes alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .paths import read_file
from .publish import MARKER, is_name
from .version import __version__

__all__ = ["RecordedFile", "recorded_files", "render"]

_SCHEMA = 2
_PACKAGES = ("torch", "transformers", "safetensors", "peft")


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """What the record says of a file.

    Attributes:
        num_bytes: Its size; None if that cannot be read.
        sha256: The digest of its bytes; None for weights.
    """

    num_bytes: int | None
    sha256: str | None


def render(provenance: Mapping[str, object], files: Mapping[str, Mapping[str, object]]) -> str:
    """Return the text of a record.

    Args:
        provenance: What the export was made from.
        files: What is known of each file, by its name.
    """
    record = {
        "fsdp_export": __version__,
        "schema": _SCHEMA,
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        **provenance,
        "files": files,
    }
    return json.dumps(record, indent=2) + "\n"


def recorded_files(folder: Path) -> dict[str, RecordedFile] | None:
    """Return what the record in a folder says of its files, by their names; None if there is no record to read."""
    try:
        files = json.loads(read_file(folder / MARKER))["files"]
        named = files.items() if isinstance(files, dict) else [(name, None) for name in files]
        return {name: _recorded(facts) for name, facts in named if is_name(name)}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _recorded(facts: Any) -> RecordedFile:
    known = facts if isinstance(facts, dict) else {"bytes": facts}  # as schema 1 had it
    num_bytes, sha256 = known.get("bytes"), known.get("sha256")
    return RecordedFile(num_bytes if isinstance(num_bytes, int) else None, sha256 if isinstance(sha256, str) else None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
