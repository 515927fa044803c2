"""The HTTP side of engines: JSON requests to one or several servers, answered in time or an error with the name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import SinkError, UsageError

__all__ = ["Server", "on_all"]

_T = TypeVar("_T")
_MAX_BODY_CHARACTERS = 2000


class Server:
    """One server of an engine. Threads may share it.

    Args:
        url: Where it is, `http://host:port`.
        timeout: Seconds to wait for an answer, unless a request says otherwise.
        headers: HTTP headers of every request, for example with a key.

    Raises:
        UsageError: The URL is none, or requests is not installed.
    """

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        try:
            import requests
        except ImportError as error:
            raise UsageError(
                "to talk to an engine needs requests", fix="Run: pip install fsdp-export[engines]"
            ) from error
        if not url.startswith(("http://", "https://")):
            raise UsageError("no URL of a server", expected="http://host:port", found=url)
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._errors = requests.exceptions
        self._session = requests.Session()
        self._session.headers.update(headers or {})

    def __str__(self) -> str:
        return self.url

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Send a POST request and return its JSON answer, or its text if it has none.

        Args:
            path: The route, with its slash.
            body: What to send as JSON; None for an empty body.
            params: The query.
            timeout: Seconds to wait for the answer; default: the server's.

        Raises:
            SinkError: There is no server, no answer in time, or an HTTP error, whose body the message has.
        """
        return self._ask("POST", path, body, params, timeout)

    def get(self, path: str, *, params: Mapping[str, str] | None = None, timeout: float | None = None) -> Any:
        """Send a GET request; otherwise as `post`."""
        return self._ask("GET", path, None, params, timeout)

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _ask(self, method: str, path: str, body: Any, params: Mapping[str, str] | None, timeout: float | None) -> Any:
        seconds = self._timeout if timeout is None else timeout
        what = f"{method} {self.url}{path}"
        try:
            answer = self._session.request(method, self.url + path, params=params, json=body, timeout=seconds)
        except self._errors.Timeout as error:
            raise SinkError(f"no answer to {what} within {seconds:g} s", fix="Look at the log of the engine") from error
        except self._errors.RequestException as error:
            reason = str(error) or type(error).__name__
            raise SinkError(f"{what} failed: {reason}", fix="Is the engine running there?") from error
        if not answer.ok:
            text = answer.text[:_MAX_BODY_CHARACTERS]
            raise SinkError(f"{what} was refused", found=f"HTTP {answer.status_code}: {text}")
        try:
            return answer.json()
        except ValueError:
            return answer.text


def on_all(servers: Sequence[Server], request: Callable[[Server], _T]) -> list[_T]:
    """Make a request of all servers at once, and return the answers in their order.

    Raises:
        SinkError: One or more of them failed, which are named; the others have been waited for.
    """
    if len(servers) == 1:
        return [request(servers[0])]
    with ThreadPoolExecutor(len(servers), f"{threading.current_thread().name}-http") as threads:
        pending = [threads.submit(request, server) for server in servers]
    errors = [error for future in pending if (error := future.exception()) is not None]
    if len(errors) > 1 and all(isinstance(error, SinkError) for error in errors):
        raise SinkError("; ".join(map(str, errors))) from errors[0]
    return [future.result() for future in pending]
