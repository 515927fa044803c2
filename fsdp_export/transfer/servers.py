"""The HTTP side of engines: JSON requests to one or several servers, answered in time or an error with the name."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from http import HTTPStatus
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ..errors import SinkError, UsageError

__all__ = ["Pending", "RefusedError", "Server", "address_towards", "on_all", "servers_at"]

_T = TypeVar("_T")
_MAX_BODY_CHARACTERS = 2000
_MAX_ANSWER_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}
_POLL_SECONDS = 0.1


class RefusedError(SinkError):
    """A server answered that it does not do what it was asked for.

    Attributes:
        status: The HTTP status of the answer.
    """

    def __init__(self, what: str, *, status: int, found: object) -> None:
        super().__init__(f"{what} was refused", found=found)
        self.status = status


class Server:
    """One server of an engine. Threads may share it, and every request ends in time, however slowly an answer comes.

    Args:
        url: Where it is, `http://host:port`.
        timeout: Seconds to wait for an answer, unless a request says otherwise.
        headers: HTTP headers of every request, for example with a key.

    Attributes:
        url: Where it is, without a slash at its end.
        place: The same for all URLs that differ in nothing that matters.

    Raises:
        UsageError: The URL is none, or requests is not installed.
    """

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        try:
            import requests
        except ImportError as error:
            fix = "Run: pip install 'fsdp-export[engines]'"
            raise UsageError("requests, which talks to engines, is not installed", fix=fix) from error
        self.place = _place(url)
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._errors = requests.exceptions
        self._session = requests.Session()
        # One connection a request: the server may have closed an idle one by the time that it is used again.
        self._session.headers.update({"Connection": "close", **(headers or {})})

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
            RefusedError: The answer is an HTTP error, whose body the message has, or says that it is no success.
            SinkError: There is no server, or no answer in time.
        """
        answer = self._ask("POST", path, body, params, timeout)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            found = answer.get("message") or answer.get("error_message") or answer
            raise RefusedError(f"POST {self.url}{path}", status=HTTPStatus.OK, found=found)
        return answer

    def post_if_known(self, path: str, body: Any = None) -> bool:
        """Send a POST request that older servers do not know; tell whether this one does. Otherwise as `post`."""
        try:
            self.post(path, body)
        except RefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True

    def get(self, path: str, *, params: Mapping[str, str] | None = None, timeout: float | None = None) -> Any:
        """Send a GET request; otherwise as `post`."""
        return self._ask("GET", path, None, params, timeout)

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _ask(self, method: str, path: str, body: Any, params: Mapping[str, str] | None, timeout: float | None) -> Any:
        seconds = self._timeout if timeout is None else timeout
        what = f"{method} {self.url}{path}"
        too_late = SinkError(f"no answer to {what} within {seconds:g} s", fix="Look at the log of the engine")
        deadline = time.monotonic() + seconds

        def request(_: Server) -> Any:
            options: Any = {"params": params, "json": body, "timeout": seconds, "stream": True}
            try:
                with self._session.request(method, self.url + path, **options) as answer:
                    return _content(answer, _read(answer, deadline, what), what)
            except (self._errors.Timeout, TimeoutError) as error:
                raise too_late from error
            except (self._errors.RequestException, UnicodeError) as error:
                # requests wraps what urllib3 says of its retries, which wraps what happened.
                cause = getattr(error.args[0], "reason", None) if error.args else None
                reason = str(cause or error) or type(error).__name__
                raise SinkError(f"{what} failed: {reason}", fix="Look whether the engine is running there") from error

        # A socket's time-out begins anew with every byte.
        pending = Pending([self], request)
        if not pending.has_ended(seconds):
            raise too_late
        return pending.wait()[0]


def _place(url: str) -> tuple[object, ...]:
    """Return what a URL says.

    Raises:
        UsageError: It is none of a server.
    """
    refusal = UsageError("no URL of a server", expected="http://host:port", found=url)
    try:
        parts = urlsplit(str(url))
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError as error:
        raise refusal from error
    if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
        raise refusal
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def servers_at(urls: str | Sequence[str], timeout: float, headers: Mapping[str, str] | None = None) -> list[Server]:
    """Return the servers of an engine.

    Raises:
        UsageError: There is none, one stands twice, or as `Server`.
    """
    servers = [Server(url, timeout, headers) for url in ([urls] if isinstance(urls, str) else urls)]
    if not servers or len({server.place for server in servers}) < len(servers):
        raise UsageError("no servers of an engine", expected="one or more URLs, each once", found=urls)
    return servers


def _read(answer: Any, deadline: float, what: str) -> bytes:
    """Read an answer that is neither too long nor too late."""
    body = bytearray()
    for chunk in answer.iter_content(_CHUNK_BYTES):
        body += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(body) > _MAX_ANSWER_BYTES:
            raise SinkError(f"{what} has no end to its answer", found=f"more than {_MAX_ANSWER_BYTES:,} bytes")
    return bytes(body)


def _content(answer: Any, body: bytes, what: str) -> Any:
    """Return what an answer says, as JSON or text."""
    text = body.decode(errors="replace")
    if not HTTPStatus.OK <= answer.status_code < HTTPStatus.MULTIPLE_CHOICES:
        found = f"HTTP {answer.status_code}: {text[:_MAX_BODY_CHARACTERS]}"
        raise RefusedError(what, status=answer.status_code, found=found)
    if answer.request.method != what.partition(" ")[0]:
        first = answer.history[0]
        found = f"HTTP {first.status_code}, to be found at {answer.url}, where it was only looked for"
        raise RefusedError(what, status=first.status_code, found=found)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def address_towards(url: str) -> str:
    """Return the address of this host from which a server is reached.

    Raises:
        SinkError: Its name is not known here.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            mine: str = probe.getsockname()[0]
    except OSError as error:
        raise SinkError(
            f"no way to {url}: {error.strerror or error}", fix="Give address=, that of this host"
        ) from error
    return mine


def on_all(servers: Sequence[Server], request: Callable[[Server], _T]) -> list[_T]:
    """Make a request of all servers at once, and return the answers in their order.

    Raises:
        SinkError: One or more of them failed, which are named; the others have been waited for.
    """
    if len(servers) == 1:
        return [request(servers[0])]
    pending = Pending(servers, request)
    errors = pending.errors()
    if len(errors) > 1 and all(isinstance(error, SinkError) for error in errors):
        raise SinkError("; ".join(map(str, errors))) from errors[0]
    return pending.wait()


class Pending(Generic[_T]):
    """A request that was just made of all servers at once, each on a thread that nobody has to wait for.

    For requests that are answered only when something else has happened, such as a transfer that this side takes
    part in: `check` tells early that it never will.

    Args:
        servers: Whom to ask.
        request: Makes it of one of them.
    """

    def __init__(self, servers: Sequence[Server], request: Callable[[Server], _T]) -> None:
        self._answers: list[Future[_T]] = [Future() for _ in servers]
        for server, answer in zip(servers, self._answers, strict=True):
            threading.Thread(
                target=_answer, args=(answer, request, server), name="fsdp-export-http", daemon=True
            ).start()

    def is_done(self) -> bool:
        """Tell whether all servers have answered, well or not."""
        return all(answer.done() for answer in self._answers)

    def has_ended(self, seconds: float) -> bool:
        """Wait at most so long for all servers, and tell whether they have answered."""
        return not wait(self._answers, seconds).not_done

    def errors(self) -> list[BaseException]:
        """Wait for all servers, and return what went wrong."""
        return [error for answer in self._answers if (error := answer.exception()) is not None]

    def check(self, seconds: float = 0) -> None:
        """Raise the error of a server that has failed by now.

        Args:
            seconds: How long to wait for one that fails.
        """
        if seconds:
            wait(self._answers, seconds, FIRST_EXCEPTION)
        for answer in self._answers:
            if answer.done():
                answer.result()

    def wait(self, check: Callable[[], None] = lambda: None) -> list[_T]:
        """Return all answers, in the order of the servers, or raise the first error of one.

        Args:
            check: Called now and then while they are waited for; may raise.
        """
        while wait(self._answers, _POLL_SECONDS, FIRST_EXCEPTION).not_done:
            self.check()
            check()
        return [answer.result() for answer in self._answers]


def _answer(answer: Future[_T], request: Callable[[Server], _T], server: Server) -> None:
    try:
        answer.set_result(request(server))
    except BaseException as error:  # noqa: BLE001  whoever waits raises it
        answer.set_exception(error)
