"""Adapters into running engines: each is a folder of its own, which the servers load in place of the one before."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ..errors import SinkError, UsageError
from ..transfer.servers import RefusedError, Server, on_all, servers_at

__all__ = ["LoRAServers"]

_log = logging.getLogger("fsdp_export")

_CONFIG = "adapter_config.json"


class LoRAServers:
    """One or more servers that serve a LoRA adapter beside their model, and load each new version of it.

    For `Exporter(model, lora="adapter").save(folder, published=servers.load)`, with a new folder each time: an engine
    knows an adapter by its path. vLLM runs with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, SGLang with
    `--enable-lora`. They must see the folder.

    With one name for all versions, vLLM exchanges them at once. SGLang does not: the old one is unloaded, which waits
    for its requests, before the new one is loaded, and requests in between are refused. With `{version}` in the name
    each version has a name of its own: the new one is loaded before the old one is unloaded, in both.

    If a server does not load a version, all go back to the one before.

    Args:
        urls: Of the servers, `http://host:port`.
        engine: What they are.
        name: What requests call the adapter; `{version}` in it becomes the name of the folder.
        keep: How many of the folders that were loaded stay on the disk, this one counted; None for all.
        path_there: What the folder that all versions are in is called where the servers run, if it is another name.
        timeout: Seconds to wait for an answer. SGLang answers when the requests of the old version have ended.
        headers: HTTP headers, for example with a key.

    Attributes:
        loaded: The folders that were loaded and are still there, the newest last.

    Raises:
        UsageError: The options cannot work.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        engine: Literal["vllm", "sglang"],
        name: str = "policy",
        keep: int | None = 2,
        path_there: str | PathLike[str] | None = None,
        timeout: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if engine not in {"vllm", "sglang"}:
            raise UsageError("no such engine", expected="vllm or sglang", found=engine)
        if keep is not None and keep < 1:
            raise UsageError("no folder to keep", expected="at least 1, or None for all", found=keep)
        self.engine, self.name, self.keep = engine, name, keep
        self.path_there = Path(path_there) if path_there is not None else None
        self.loaded: list[Path] = []
        self._servers = servers_at(urls, timeout, headers)
        self._prefix = "/v1" if engine == "vllm" else ""

    def name_of(self, folder: Path) -> str:
        """Return what requests call the adapter of a folder."""
        return self.name.replace("{version}", folder.name)

    def load(self, folder: str | PathLike[str]) -> None:
        """Have all servers load an adapter, and drop the one before.

        Args:
            folder: Where it is.

        Raises:
            SinkError: A server refused it or did not answer; all have the one before, as far as they answer.
            UsageError: There is no adapter, or the folder was loaded before and is still there.
        """
        folder = Path(folder).absolute()
        if not (folder / _CONFIG).exists():
            raise UsageError(f"no {_CONFIG}, so no adapter", file=folder, fix="Use Exporter(model, lora='adapter')")
        old = self.loaded[-1] if self.loaded else None
        if folder.resolve() in {path.resolve() for path in self.loaded}:  # it would be removed as an old one
            raise UsageError("the servers have loaded this folder", file=folder, fix="Save every version to a new one")
        try:
            on_all(self._servers, lambda server: self._exchange(server, old, folder))
        except SinkError as error:
            self._go_back(old, folder)
            state = f"have {old.name} again" if old is not None else "have none"
            raise SinkError(str(error).rstrip("."), fix=f"Servers that answer {state}") from error
        if old is not None and self.name_of(old) != self.name_of(folder):
            on_all(self._servers, lambda server: self._try(server, lambda: self._unload(server, old)))
        self.loaded.append(folder)
        self._remove_old()

    def _exchange(self, server: Server, old: Path | None, new: Path) -> None:
        """Load an adapter, in place of one of the same name."""
        if self.engine == "vllm":
            try:
                return self._load(server, new, load_inplace=True)
            except RefusedError as error:
                # Older ones do not know the option.
                if "already been loaded" not in str(error):
                    raise
        # A trainer that was restarted does not know whether there is one.
        if old is None or self.name_of(old) == self.name_of(new):
            with suppress(RefusedError):
                self._unload(server, new)
        return self._load(server, new)

    def _go_back(self, old: Path | None, new: Path) -> None:
        """Have the servers serve the version before, whatever they have now."""

        def go_back(server: Server) -> None:
            if old is None or self.name_of(old) != self.name_of(new):
                with suppress(SinkError):
                    self._unload(server, new)
            else:
                self._try(server, lambda: self._exchange(server, None, old))

        on_all(self._servers, go_back)

    def _try(self, server: Server, call: Callable[[], None]) -> None:
        try:
            call()
        except SinkError as error:
            _log.warning("%s may have another adapter than it should: %s", server, error)

    def _load(self, server: Server, folder: Path, **options: Any) -> None:
        path = folder if self.path_there is None else self.path_there / folder.name
        self._post(server, "load_lora_adapter", {"lora_name": self.name_of(folder), "lora_path": str(path), **options})

    def _unload(self, server: Server, folder: Path) -> None:
        self._post(server, "unload_lora_adapter", {"lora_name": self.name_of(folder)})

    def _post(self, server: Server, route: str, body: Mapping[str, Any]) -> None:
        server.post(f"{self._prefix}/{route}", body)

    def _remove_old(self) -> None:
        while self.keep is not None and len(self.loaded) > self.keep:
            shutil.rmtree(self.loaded.pop(0), ignore_errors=True)
