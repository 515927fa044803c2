"""Names for places that mean something elsewhere: the record of an export may be published with the weights."""

from __future__ import annotations

from pathlib import Path

__all__ = ["hub_model", "recorded_place"]

_HOMES = {Path("/home"), Path("/Users")}
_CACHED = "models--"


def recorded_place(folder: Path) -> str:
    """Return the last two parts of a folder's path; the last alone where the other is the name of a person."""
    folder = folder.absolute()
    is_at_home = folder.parent == Path.home() or folder.parent.parent in _HOMES
    return "/".join(folder.parts[-1 if is_at_home else -2 :]).replace("//", "/")


def hub_model(folder: Path) -> tuple[str, str] | None:
    """Return the id and the commit of the model whose snapshot in the hub's cache a folder is; None if it is none."""
    if len(folder.parents) < 2 or folder.parent.name != "snapshots":  # noqa: PLR2004 - snapshots/ and its model
        return None
    model = folder.parents[1].name
    return (model.removeprefix(_CACHED).replace("--", "/", 1), folder.name) if model.startswith(_CACHED) else None
