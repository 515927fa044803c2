"""A new folder for every save and a link to the newest, for engines that read weights from disk, and for any reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ..errors import SinkError, UsageError
from ..plan import Plan
from ..publish import NewVersion
from .engine_control import EngineControl, EngineKind
from .huggingface import HuggingFaceSink

__all__ = ["Destination", "FolderPerVersion", "VersionSink"]


class FolderPerVersion:
    """Where `Exporter.save` and `save_checkpoint` write a new folder each time, in place of a path.

    Below the path every version has a folder of its own, and the link `latest` points to the newest complete one. What
    a reader has opened never changes: it resolves the link once (`os.path.realpath`) and reads what it then has, which
    stays for `keep` saves. An engine that is named loads each version by itself, as part of the save.

    Args:
        path: The folder of all versions.
        keep: How many versions stay, this one counted; None for all. Other folders are left alone.
        version: What to call the next version and its folder; None for the next number.
        urls: Servers of an engine that load it, `http://host:port`. They must see the folder.
        engine: What they are.
        engine_path: What `path` is called where they run, if it is something else.
        timeout: Seconds that they may take.
        pause: How requests in progress are paused meanwhile, as for `IPC`.
        flush_cache: Whether what the engine computed with the old weights is dropped.
        headers: HTTP headers of all requests, for example with a key.

    Attributes:
        version: As above; may be set before each save.

    Raises:
        UsageError: The options do not go together.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        keep: int | None = 2,
        version: str | int | None = None,
        urls: str | Sequence[str] = (),
        engine: EngineKind | None = None,
        engine_path: str | PathLike[str] | None = None,
        timeout: float = 600.0,
        pause: str | None = None,
        flush_cache: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError("no version to keep", expected="at least 1, or None for all", found=keep)
        if bool(urls) != (engine is not None):
            raise UsageError("urls and engine go together", expected="both or none")
        self.path, self.keep, self.version = Path(path), keep, version
        self._engine_path, self._timeout = Path(engine_path or Path(path).absolute()), timeout
        self._control = engine and EngineControl(
            urls, engine=engine, timeout=timeout, pause=pause, flush_cache=flush_cache, headers=headers
        )

    def sink(self, folder: Path, **options: Any) -> VersionSink:
        """Return what writes the next version; see `HuggingFaceSink` for the options. The folder is this one's path."""
        return VersionSink(self, **options)

    def check(self, what: str) -> None:
        """Refuse what the engine cannot load.

        Args:
            what: What is written, if it is no model.

        Raises:
            UsageError: It is none.
        """
        if what and self._control:
            raise UsageError(f"no engine reloads its model from a {what}", fix="Use lora='merge', or name no urls")

    def load(self, name: str) -> None:
        """Have the engine load a version.

        Raises:
            SinkError: It did not.
        """
        if not self._control:
            return
        control, path = self._control, fspath(self._engine_path / name)
        try:
            control.pause()
        except SinkError:
            with suppress(SinkError):
                control.give_back()
            raise
        if control.engine == "vllm":
            work: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        else:
            work = {"model_path": path}
        control.result(control.update(work, "/update_weights_from_disk", name, self._timeout), self._timeout)
        control.finish(name, is_asked_for=self.version is not None)
        control.resume()


class VersionSink(HuggingFaceSink):
    """Writes a folder as `HuggingFaceSink` does, the next version of those in its folder.

    Args:
        versions: Where they are.
        **options: For `HuggingFaceSink`.
    """

    def __init__(self, versions: FolderPerVersion, **options: Any) -> None:
        # The folder has another name until it is published.
        self._published_version = options.pop("published", None)
        super().__init__(versions.path, **options)
        versions.check(options.get("kind", ""))
        self._versions = versions
        self._name = ""
        self._new: NewVersion | None = None

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """Choose the version, then as `HuggingFaceSink.begin`."""
        version = self._versions.version
        name = str(version) if version is not None else None
        self._new = NewVersion.begin(self._versions.path, name, fsync=self.fsync)
        self.folder = self._new.staging
        return json.dumps(
            [self._new.name, str(self.folder.relative_to(self._versions.path)), super().begin(plan, cards)]
        )

    def open(self, plan: Plan, rank: int, ticket: str) -> None:
        """As `FileSink.open`, in the folder of the version."""
        self._name, staging, ticket = json.loads(ticket)
        self.folder = self._versions.path / staging
        super().open(plan, rank, ticket)

    def commit(self) -> None:
        """As `FileSink.commit`; then show the version, have the engine load it, and remove old ones."""
        assert self._new is not None
        super().commit()
        self._new.publish()
        self._versions.load(self._name)
        if self._published_version is not None:
            self._published_version(self._versions.path / self._name)
        self._new.remove_old(self._versions.keep)
        self._new = None

    def abort(self) -> None:
        """Remove a version that is not complete; see `Sink.abort`."""
        super().abort()
        if self._new is not None:
            self._new.abort()
            self._new = None

    @property
    def destination(self) -> Path:
        """Where the files are when the export is complete."""
        return self._versions.path / self._name


Destination = str | PathLike[str] | FolderPerVersion
"""Where a save goes: into one folder, or into a new one each time."""
