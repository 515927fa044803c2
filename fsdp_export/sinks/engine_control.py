"""What servers of vLLM and SGLang are told around an update that they make in answer to one request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..errors import SinkError, UsageError
from ..transfer.servers import Pending, Server, on_all, servers_at

__all__ = ["EngineControl", "EngineKind"]

EngineKind = Literal["vllm", "sglang"]
"""What the servers are."""

_PAUSE = {"vllm": "/pause", "sglang": "/pause_generation"}
_RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}
_MODES = {"vllm": ("abort", "wait", "keep"), "sglang": ("abort", "retract", "in_place")}


class EngineControl:
    """One or several servers of a kind. Every request goes to all of them at once, and raises if one fails.

    Args:
        urls: Where they are.
        engine: What they are.
        timeout: Seconds to wait for an answer.
        pause: How requests are paused, in the engine's words; None if they are not.
        flush_cache: Whether what was computed with the old weights is dropped.
        headers: HTTP headers of every request.

    Raises:
        UsageError: There is no such engine, or way to pause it, or as `servers_at`.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        engine: EngineKind,
        timeout: float,
        pause: str | None,
        flush_cache: bool,
        headers: Mapping[str, str] | None,
    ) -> None:
        if engine not in _MODES:
            raise UsageError("no such engine", expected="vllm or sglang", found=repr(engine))
        if pause not in {*_MODES[engine], None}:
            raise UsageError("no such way to pause", expected=f"{', '.join(_MODES[engine])} or None", found=repr(pause))
        self.engine, self._is_vllm = engine, engine == "vllm"
        self._servers = servers_at(urls, timeout, headers)
        self._timeout, self._pause, self._flush_cache = timeout, pause, flush_cache
        self._is_mixed = False

    def pause(self) -> None:
        """Stop generating, if that is wanted."""
        if self._pause is not None:
            mode: Any = {"mode": self._pause}
            options = {"params": mode} if self._is_vllm else {"body": mode}
            on_all(self._servers, lambda server: server.post(_PAUSE[self.engine], **options))

    def resume(self) -> None:
        """Generate again, if that was paused."""
        if self._pause is not None:
            body: Any = None if self._is_vllm else {}
            on_all(self._servers, lambda server: server.post(_RESUME[self.engine], body))
        self._is_mixed = False

    def give_back(self) -> None:
        """Generate again with the weights of before, unless an earlier update was broken off and they are a mixture."""
        if not self._is_mixed:
            self.resume()

    def update(self, work: Mapping[str, Any], route: str, version: str, timeout: float) -> Pending[Any]:
        """Ask for an update, which is answered when it is done.

        Args:
            work: The worker's method and arguments, for vLLM; what SGLang's route needs.
            route: That of SGLang.
            version: What the weights will be called.
            timeout: Seconds to wait for the answer.
        """
        self._is_mixed = True
        if self._is_vllm:
            route = "/collective_rpc"
        else:
            work = {**work, "weight_version": version, "flush_cache": self._flush_cache}
        return Pending(self._servers, lambda server: server.post(route, work, timeout=timeout))

    def result(self, update: Pending[Any], timeout: float) -> None:
        """Wait for the answers to an update."""
        deadline = time.monotonic() + timeout

        def check() -> None:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, self._servers))
                what = f"no answer of {names} to the update within {timeout:g} s"
                raise SinkError(what, fix="Look at the log of the engine")

        update.wait(check)

    def finish(self, version: str, *, is_asked_for: bool) -> None:
        """Do for vLLM what SGLang does within an update: drop caches, and call the weights something.

        Args:
            version: What to call them.
            is_asked_for: Whether a server that cannot do that is an error.
        """
        if self._is_vllm:
            on_all(self._servers, lambda server: self._finish(server, version, is_asked_for=is_asked_for))

    def _finish(self, server: Server, version: str, *, is_asked_for: bool) -> None:
        if self._flush_cache:
            server.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            server.post_if_known("/reset_encoder_cache")
        post = server.post if is_asked_for else server.post_if_known
        post("/update_weight_version", {"new_version": version})
