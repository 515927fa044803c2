"""What a sidecar is: a file beside the weights, its content, and where that comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config_json import Edits, edit_json
from ..paths import read_file
from ..places import hub_model, recorded_place
from .origins import CONFIG

__all__ = ["Origin", "OriginKind", "Sidecar", "Sidecars", "changed_keys"]

OriginKind = Literal["source", "parent", "base model", "live object", "fsdp-export"]
"""Where a sidecar comes from: the checkpoint's folder, one above, the base model, a live object; or we made it."""


@dataclass(frozen=True)
class Origin:
    """Where the content of a sidecar comes from.

    Attributes:
        kind: Where from.
        folder: The folder that has the file; None for content that was made.
        place: That folder in the record of the export, which may be published with the weights: relative to the
            checkpoint, or the id of a model on the hub. Empty for the checkpoint's own folder.
        revision: The commit of the model on the hub.
        made_of: What content that was made is made of, in words.
        changed: What was changed in it, in words.
    """

    kind: OriginKind
    folder: Path | None = None
    place: str = ""
    revision: str | None = None
    made_of: str = ""
    changed: tuple[str, ...] = ()

    @classmethod
    def elsewhere(cls, kind: OriginKind, folder: Path) -> Origin:
        """Return the origin of files in a folder that is not that of the checkpoint: on the hub, or on this machine."""
        model = hub_model(folder)
        place, revision = model if model is not None else (recorded_place(folder), None)
        return cls(kind, folder, place, revision)

    def but(self, changed: Iterable[str]) -> Origin:
        """Return it with further changes."""
        return replace(self, changed=tuple(dict.fromkeys((*self.changed, *changed))))

    def __str__(self) -> str:
        first = f"copied from {self.folder}" if self.folder is not None else f"made of {self.made_of}"
        return first + (f", changed: {', '.join(self.changed)}" if self.changed else "")

    def as_json(self) -> dict[str, object]:
        """Return what the record of an export says of it."""
        facts = {"from": self.kind, "at": self.place, "revision": self.revision, "made_of": self.made_of}
        return {key: value for key, value in (*facts.items(), ("changed", list(self.changed))) if value}


@dataclass(frozen=True)
class Sidecar:
    """One file beside the weights.

    Attributes:
        name: Its name in the folder, with `/` between parts.
        origin: Where it comes from.
        content: Its bytes, or the file to copy them from.
    """

    name: str
    origin: Origin
    content: bytes | Path

    def text(self) -> str:
        """Return the content of a text file."""
        return (read_file(self.content) if isinstance(self.content, Path) else self.content).decode()


@dataclass
class Sidecars:
    """What will be written beside the weights.

    Attributes:
        files: The files.
        missing: What was looked for and is not there, in words.
        warnings: What a user should know, in sentences without a full stop.
        config: The parsed `config.json` as it will be written; None without one.
        config_file: The file that it was read from, if it was.
        edits: What of the config the weights' shapes change; see `fit_config`.
        base_model: The base model that was named.
    """

    files: list[Sidecar] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_file: Path | None = None
    edits: Edits = field(default_factory=dict)
    base_model: Origin | None = None

    def add(self, files: Mapping[str, bytes | Path], origin: Origin) -> None:
        """Add files, except those whose names are taken."""
        taken = {sidecar.name for sidecar in self.files}
        self.files += [Sidecar(name, origin, content) for name, content in files.items() if name not in taken]

    def edit_config(self, edits: Edits) -> None:
        """Change keys of the config, which is there."""
        if not edits:
            return
        position = next(index for index, sidecar in enumerate(self.files) if sidecar.name == CONFIG)
        old = self.files[position]
        text = edit_json(old.text(), edits)
        self.files[position] = Sidecar(CONFIG, old.origin.but(changed_keys(edits)), text.encode())
        self.config = json.loads(text)

    def lacks(self, name: str, reason: str) -> None:
        """Note that a file is not written, and why."""
        self.missing.append(name)
        self.warnings.append(f"{name} was not written: {reason}")


def changed_keys(edits: Edits) -> list[str]:
    """Return the keys that edits change, in the order of the alphabet."""
    return sorted(".".join(path) for path in edits)
