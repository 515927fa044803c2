"""What SGLang servers are told over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple

from ..errors import SinkError, UsageError
from ..table import dtype_name
from ..transfer.buckets import Bucket
from ..transfer.process_group import SenderGroup
from ..transfer.servers import Pending, RefusedError, Server, address_towards, on_all, servers_at

__all__ = ["Control", "Workers"]

_FAREWELL_SECONDS = 5.0


class Workers(NamedTuple):
    """The workers of a server.

    Attributes:
        number: How many there are.
        since: Tells those of before a restart from those after it; the same for all where a server does not say.
    """

    number: int
    since: str


class Control:
    """All servers of an engine. Each request goes to all at once, and raises if one of them refuses it.

    Args:
        urls: Of the servers.
        timeout: Seconds to wait for an answer.
        headers: HTTP headers.
        selector: Which models of a server are updated.
    """

    def __init__(
        self, urls: str | Sequence[str], timeout: float, headers: Mapping[str, str] | None, selector: str
    ) -> None:
        self.servers = servers_at(urls, timeout, headers)
        self._selector, self._timeout = selector, timeout
        self._has_session = True

    def __str__(self) -> str:
        return ", ".join(map(str, self.servers))

    def workers(self) -> list[Workers]:
        """Return what workers each server has.

        Raises:
            UsageError: They cannot take weights from a process group.
        """
        return on_all(self.servers, _workers)

    def join(self, group: SenderGroup, workers: Sequence[Workers], address: str | None) -> Pending[Any]:
        """Have all workers join the process group; they do that at the same time as this process."""
        common = {"world_size": group.num_ranks, "group_name": group.name, "backend": group.backend}
        first_ranks, rank = {}, 1
        for server, (number, _) in zip(self.servers, workers, strict=True):
            first_ranks[server], rank = rank, rank + number

        def join(server: Server) -> Any:
            place = {"master_address": address or address_towards(server.url), "master_port": group.port}
            return server.post("/init_weights_update_group", {**place, "rank_offset": first_ranks[server], **common})

        return Pending(self.servers, join)

    def pause(self, mode: str) -> None:
        """Stop generating."""
        self._on_all("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Go on generating."""
        self._on_all("/continue_generation", {})

    def begin(self) -> None:
        """Begin the session of an update; one that somebody left open is ended before. Older servers have none."""
        self._has_session = True

        def begin(server: Server) -> bool:
            body = {"selector": self._selector}
            try:
                return server.post_if_known("/begin_weight_update", body)
            except RefusedError:
                with suppress(RefusedError):
                    server.post("/end_weight_update", {})
                server.post("/begin_weight_update", body)
                return True

        have = on_all(self.servers, begin)
        if any(have) and not all(have):
            raise SinkError(f"some of {self} have /begin_weight_update and some have not", fix="Run one version on all")
        self._has_session = all(have)

    def receive(self, bucket: Bucket, group_name: str) -> Pending[Any]:
        """Have all workers receive a bucket and load it."""
        infos = [entry.info for entry in bucket.entries]
        body: dict[str, Any] = {
            "names": [info.name for info in infos],
            "dtypes": [dtype_name(info.dtype) for info in infos],
            "shapes": [list(info.shape) for info in infos],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            # A busy server fails to do so, when it has loaded the weights; see `flush`.
            "flush_cache": False,
        }
        if self._has_session:
            body["selector"] = self._selector
        return Pending(self.servers, lambda server: server.post("/update_weights_from_distributed", body))

    def end(self) -> None:
        """End the session."""
        if self._has_session:
            self._on_all("/end_weight_update", {})

    def flush(self, patience: float) -> None:
        """Drop what was computed with the old weights.

        Args:
            patience: Seconds that a server may take until no request runs.
        """
        query = {"timeout": f"{patience:g}"}
        on_all(self.servers, lambda server: server.post("/flush_cache", params=query))

    def set_version(self, version: str) -> None:
        """Say what the weights are called. Older servers have no such thing."""
        body = {"new_version": version, "abort_all_requests": False}
        on_all(self.servers, lambda server: server.post_if_known("/update_weight_version", body))

    def leave(self, group_name: str, *, is_session: bool, pause: str | None, resume: bool) -> list[SinkError]:
        """Tell all servers that an update is off, as far as they listen; never raises.

        Args:
            group_name: Of the process group, which they leave.
            is_session: Whether a session is to be ended.
            pause: How they are to be paused; None if they are to be left as they are.
            resume: Whether they are to go on generating.

        Returns:
            Why a server may be in another state.
        """
        requests: list[tuple[str, dict[str, Any]]] = [("/pause_generation", {"mode": pause})] if pause else []
        requests += [("/end_weight_update", {})] if is_session and self._has_session else []
        requests += [("/destroy_weights_update_group", {"group_name": group_name})] if group_name else []
        requests += [("/continue_generation", {})] if resume else []
        errors: list[SinkError] = []

        def leave(server: Server) -> None:
            for path, body in requests:
                try:
                    server.post(path, body, timeout=min(_FAREWELL_SECONDS, self._timeout))
                except RefusedError as error:
                    if "destroy" not in path:  # there may be none
                        errors.append(error)
                except SinkError as error:
                    errors.append(error)
                    return  # it would not answer the others either

        on_all(self.servers, leave)
        return errors

    def _on_all(self, path: str, body: Any) -> None:
        on_all(self.servers, lambda server: server.post(path, body))


def _workers(server: Server) -> Workers:
    try:
        info = server.get("/server_info")
    except RefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        info = server.get("/get_server_info")
    if not isinstance(info, Mapping) or type(info.get("tp_size")) is not int or info["tp_size"] < 1:
        raise SinkError(f"{server} does not say how many workers it has", expected="tp_size in /server_info")
    if info.get("pp_size", 1) > 1:
        raise UsageError(
            f"{server} is split into pipeline stages, whose workers would be one rank", expected="pp_size 1"
        )
    if info.get("dp_size", 1) > 1 and not info.get("enable_dp_attention"):
        what = f"{server} has data-parallel replicas, and SGLang updates none of them"
        raise UsageError(what, fix="Start a server for each, and give all their URLs")
    return Workers(info["tp_size"], json.dumps(info.get("startup_time"), sort_keys=True))
