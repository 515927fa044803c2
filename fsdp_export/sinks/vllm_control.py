"""What the servers of vLLM are told around a transfer. The routes are those of vLLM 0.28 to 0.33."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from ..errors import SinkError
from ..transfer.buckets import Bucket
from ..transfer.servers import Pending, RefusedError, Server, on_all, servers_at

__all__ = ["Control", "are_whole"]

_INCOMPLETE, _GIVEN_UP = "-incomplete", "-given-up"
"""What follows the version while an update is under way, and once it was given up."""
_CANCEL_SECONDS = 10.0
_MAX_ANSWER_CHARACTERS = 200


class Control:
    """Some servers of vLLM, each with one or more workers. Every call asks all of them at once.

    A version that says so marks weights that are part old, part new: vLLM itself has no word for that, and whoever
    comes after a trainer that died must know it.

    Args:
        urls: Where the servers are.
        timeout: Seconds to wait for an answer.
        headers: HTTP headers of every request.
    """

    def __init__(self, urls: str | Sequence[str], timeout: float, headers: Mapping[str, str] | None) -> None:
        self.servers = servers_at(urls, timeout, headers)
        self._timeout = timeout

    def __str__(self) -> str:
        return ", ".join(map(str, self.servers))

    def world_sizes(self) -> list[int]:
        """Return how many workers each server has: tensor, pipeline and data parallel ones."""
        return self._ask(_world_size)

    def versions(self) -> list[str]:
        """Return what each server calls its weights."""
        return self._ask(_version)

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stop generating; `mode` says what becomes of requests."""
        params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        self._ask(lambda server: server.post("/pause", params=params))

    def resume(self) -> None:
        """Generate again."""
        self._ask(lambda server: server.post("/resume"))

    def join(self, first_ranks: Sequence[int], rendezvous: Mapping[str, Any]) -> Pending[Any]:
        """Have all workers join a communicator; answered once they have.

        Args:
            first_ranks: The rank of the first worker of each server.
            rendezvous: The rest of vLLM's init info.
        """

        def request(server: Server) -> None:
            info = {**rendezvous, "rank_offset": first_ranks[self.servers.index(server)]}
            server.post("/init_weight_transfer_engine", {"init_info": info})

        return Pending(self.servers, request)

    def leave(self) -> None:
        """Have all workers leave the communicator that they know, if the servers can."""

        def request(server: Server) -> None:
            with suppress(SinkError):  # came with 0.33
                server.post("/shutdown_weight_transfer_engine", timeout=self._cancel_seconds)

        self._ask(request)

    def start(self, version: str) -> None:
        """Begin an update."""

        def request(server: Server) -> None:
            server.post("/update_weight_version", {"new_version": version + _INCOMPLETE})
            server.post("/start_weight_update")

        self._ask(request)

    def receive(self, bucket: Bucket) -> Pending[Any]:
        """Have all workers receive a bucket and load what is in it; answered once they have."""
        infos = [entry.info for entry in bucket.entries]
        update = {
            "names": [info.name for info in infos],
            "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
            "shapes": [list(info.shape) for info in infos],
        }
        return Pending(self.servers, lambda server: server.post("/update_weights", {"update_info": update}))

    def finish(self, version: str) -> None:
        """End an update, and see that the weights are called as wanted."""

        def request(server: Server) -> None:
            server.post("/finish_weight_update", {"weight_version": version})
            if (found := _version(server)) != version:
                raise SinkError(f"{server} has other weights than were sent", expected=repr(version), found=repr(found))

        self._ask(request)

    def flush(self) -> None:
        """Drop what was computed with other weights. Requests that were kept are computed anew."""

        def request(server: Server) -> None:
            try:
                server.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            except RefusedError as error:
                raise SinkError(str(error), fix="Is a request still in transfer there?") from error
            server.post("/reset_encoder_cache")

        self._ask(request)

    def give_up(self) -> None:
        """End updates that have not been finished, so that nothing of them is left in the next one.

        vLLM keeps what has come of a module until all of it is there, also after an error, and would count it as a
        part of the next update. Only `finish` drops it, and after an error only if `start` comes before.
        """
        seconds = self._cancel_seconds

        def request(server: Server) -> None:
            version = _version(server, seconds)
            if not version.endswith(_INCOMPLETE):
                return
            body = {"weight_version": version.removesuffix(_INCOMPLETE) + _GIVEN_UP}
            try:
                server.post("/finish_weight_update", body, timeout=seconds)
            except SinkError:
                server.post("/start_weight_update", timeout=seconds)
                server.post("/finish_weight_update", body, timeout=seconds)

        self._ask(request)

    @property
    def _cancel_seconds(self) -> float:
        return min(self._timeout, _CANCEL_SECONDS)

    def _ask(self, request: Any) -> list[Any]:
        return on_all(self.servers, request)


def are_whole(versions: Iterable[str]) -> bool:
    """Tell whether weights of such versions are of one update each."""
    return not any(version.endswith((_INCOMPLETE, _GIVEN_UP)) for version in versions)


def _version(server: Server, timeout: float | None = None) -> str:
    return str(_field(server, server.get("/weight_info", timeout=timeout), "weight_version", str))


def _world_size(server: Server) -> int:
    try:
        answer = server.get("/get_world_size", params={"include_dp": "true"})
    except RefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise SinkError(str(error), fix="Start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment") from error
    size: int = _field(server, answer, "world_size", int)
    if size < 1:
        raise SinkError(f"{server} has no workers", expected="a world_size of 1 or more", found=size)
    return size


def _field(server: Server, answer: Any, name: str, kind: type) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if type(value) is not kind:
        what, found = f"{server} gives an answer that vLLM does not give", repr(answer)[:_MAX_ANSWER_CHARACTERS]
        raise SinkError(what, expected=f"a {kind.__name__} {name}", found=found)
    return value
