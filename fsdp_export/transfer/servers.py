"""The HTTP side of engines: JSON requests to one or several servers, answered in time or an error with the name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import SinkError, UsageError

__all__ = ["Call", "Server", "on_all"]

_T = TypeVar("_T")
_MAX_BODY_CHARACTERS = 2000
_NOT_FOUND = 404


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
        optional: bool = False,
    ) -> Any:
        """Send a POST request and return its JSON answer, or its text if it has none.

        Args:
            path: The route, with its slash.
            body: What to send as JSON; None for an empty body.
            params: The query.
            timeout: Seconds to wait for the answer; default: the server's.
            optional: Whether None is returned if the server has no such route, as older ones may not.

        Raises:
            SinkError: There is no server, no answer in time, or an HTTP error, whose body the message has.
        """
        return self._ask("POST", path, body, params, timeout, optional=optional)

    def get(self, path: str, *, params: Mapping[str, str] | None = None, timeout: float | None = None) -> Any:
        """Send a GET request; otherwise as `post`."""
        return self._ask("GET", path, None, params, timeout)

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: Any,
        params: Mapping[str, str] | None,
        timeout: float | None,
        *,
        optional: bool = False,
    ) -> Any:
        seconds = self._timeout if timeout is None else timeout
        what = f"{method} {self.url}{path}"
        try:
            answer = self._session.request(method, self.url + path, params=params, json=body, timeout=seconds)
        except self._errors.Timeout as error:
            raise SinkError(f"no answer to {what} within {seconds:g} s", fix="Look at the log of the engine") from error
        except self._errors.RequestException as error:
            reason = str(error) or type(error).__name__
            raise SinkError(f"{what} failed: {reason}", fix="Is the engine running there?") from error
        if optional and answer.status_code == _NOT_FOUND:
            return None
        if not answer.ok:
            text = answer.text[:_MAX_BODY_CHARACTERS]
            raise SinkError(f"{what} was refused", found=f"HTTP {answer.status_code}: {text}")
        try:
            return answer.json()
        except ValueError:
            return answer.text


class Call:
    """A request that is answered only when much else has happened, made at once on a thread of its own.

    The thread is a daemon: an engine that never answers must not keep the program from ending.

    Args:
        request: Makes the request and returns the answer.
        name: What errors call it.
    """

    def __init__(self, request: Callable[[], Any], name: str) -> None:
        self._request, self._name = request, name
        self._answer: Any = None
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        threading.Thread(target=self._run, name="fsdp-export-call", daemon=True).start()

    def is_done(self) -> bool:
        """Tell whether there is an answer.

        Raises:
            SinkError: The request failed.
        """
        if not self._is_done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended, well or not, or the seconds are over; tell whether it has."""
        return self._is_done.wait(timeout)

    def result(self, timeout: float) -> Any:
        """Wait for the answer.

        Raises:
            SinkError: The request failed, or there is no answer within so many seconds.
        """
        self.wait(timeout)
        if not self.is_done():
            raise SinkError(f"no answer to {self._name} within {timeout:g} s", fix="Look at the log of the engine")
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._request()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised where somebody waits
            self._error = error
        finally:
            self._is_done.set()


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
