"""Requests to real HTTP servers that answer, refuse, stall or are gone."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ranks import free_port

from fsdp_export.errors import SinkError, UsageError
from fsdp_export.transfer.servers import Pending, Server, on_all, servers_at


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/stall":
            threading.Event().wait()
        elif self.path == "/refuse":
            self._answer(500, b"CUDA ran out of luck")
        elif self.path == "/fail":
            self._answer(200, b'{"success": false, "message": "a cache that is in use"}')
        elif self.path == "/unknown":
            self._answer(404, b"Not Found")
        elif self.path == "/text":
            self._answer(200, b"fine")
        else:
            heard = {"path": self.path, "body": json.loads(body or b"null"), "key": self.headers.get("Authorization")}
            heard["connection"] = self.headers.get("Connection")
            self._answer(200, json.dumps(heard).encode())

    def do_GET(self) -> None:
        self.do_POST()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.socket.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Handler) as found:
        yield found


def test_what_is_sent_arrives(url):
    server = Server(url + "/", 60, {"Authorization": "Bearer key"})
    heard = server.post("/update?a=1", {"names": ["ä", "b"], "shapes": [[1, 2], []]}, params={"mode": "keep"})
    assert heard["body"] == {"names": ["ä", "b"], "shapes": [[1, 2], []]}
    assert (heard["key"], heard["connection"]) == ("Bearer key", "close")
    assert "mode=keep" in heard["path"]
    assert server.post("/empty")["body"] is None
    assert server.get("/version")["path"] == "/version"
    assert server.post("/text") == "fine"


def test_a_refusal_brings_the_body_of_the_answer(url):
    with pytest.raises(SinkError, match=rf"POST {url}/refuse was refused: found HTTP 500: CUDA ran out of luck"):
        Server(url, 60).post("/refuse")


def test_an_answer_that_says_that_it_is_no_success_is_a_refusal(url):
    with pytest.raises(SinkError, match=rf"POST {url}/fail was refused: found a cache that is in use"):
        Server(url, 60).post("/fail")


def test_a_route_that_older_servers_lack_may_be_missing_but_not_refuse(url):
    server = Server(url, 60)
    assert server.post_if_known("/text")
    assert not server.post_if_known("/unknown")
    for route in ("/refuse", "/fail"):
        with pytest.raises(SinkError, match=f"{route} was refused"):
            server.post_if_known(route)


def test_a_server_that_stalls_is_named(url):
    with pytest.raises(SinkError, match=rf"no answer to POST {url}/stall within 0.2 s"):
        Server(url, 60).post("/stall", timeout=0.2)


def test_a_server_that_is_not_there_is_named():
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SinkError, match=f"GET {gone}/x failed: .*refused. Look whether the engine") as caught:
        Server(gone, 60).get("/x")
    assert "retries" not in str(caught.value)


def test_several_servers_answer_in_their_order_and_all_that_failed_are_named(url):
    servers = [Server(url, 60, {"Authorization": name}) for name in "abc"]
    assert [heard["key"] for heard in on_all(servers, lambda server: server.post("/x"))] == ["a", "b", "c"]
    first, second = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    others = [Server(first, 60), servers[0], Server(second, 60)]
    with pytest.raises(SinkError, match=rf"(?s){first}/x failed.*{second}/x failed"):
        on_all(others, lambda server: server.post("/x"))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "ftp://a:1", "http://a:b", "http://a:1/?key=2", "http://[::1", "", 8000]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UsageError, match="no URL of a server: expected http://host:port, found"):
        Server(url, 60)


def test_a_request_under_way_is_answered_later_or_fails_early(url):
    server, is_asked = Server(url, 600), threading.Event()
    assert [heard["path"] for heard in Pending([server, server], lambda s: s.post("/x")).wait()] == ["/x", "/x"]

    def request(asked: Server) -> Any:
        if asked is server:
            return asked.post("/stall")
        is_asked.wait()
        return asked.post("/refuse")

    pending = Pending([server, Server(url, 60)], request)
    pending.check()
    is_asked.set()
    with pytest.raises(SinkError, match="CUDA ran out of luck"):
        pending.check(60)
    with pytest.raises(SinkError, match="CUDA ran out of luck"):
        pending.wait()
    assert not pending.is_done()


def test_whoever_waits_for_a_request_may_lose_patience(url):
    def check() -> None:
        raise SinkError("no longer")

    with pytest.raises(SinkError, match="no longer"):
        Pending([Server(url, 600)], lambda server: server.post("/stall")).wait(check)


def test_an_answer_that_never_ends_is_not_waited_for():
    """A byte now and then is in time for each wait of a socket, and too many fill the memory."""

    class Endless(Handler):
        def do_POST(self) -> None:
            chunk, pause = (b" ", 0.05) if self.path == "/slow" else (b" " * (1 << 20), 0)
            begin = b"HTTP/1.1 200 OK\r\n" + (b"" if self.path == "/head" else b"\r\n")
            with suppress(OSError):
                self.wfile.write(begin)
                for number in itertools.count():
                    self.wfile.write(b"X-%d: 1\r\n" % number if self.path == "/head" else chunk)
                    time.sleep(0.05 if self.path == "/head" else pause)

    with serving(Endless) as url:
        for path in ("/slow", "/head"):
            with pytest.raises(SinkError, match=rf"no answer to POST {url}{path} within 0.3 s"):
                Server(url, 0.3).post(path)
        with pytest.raises(SinkError, match=rf"GET {url}/much has no end to its answer: found more than"):
            Server(url, 60).get("/much")


def test_a_post_that_is_redirected_to_a_page_is_refused():
    """A way in that asks for a key, or for https, answers so; what is found there is no answer of the engine."""

    class Redirected(Handler):
        def do_POST(self) -> None:
            if self.path == "/page":
                self._answer(200, b"log in")
                return
            self.send_response(int(self.path[1:4]))
            if not self.path.endswith("nowhere"):
                self.send_header("Location", "/page")
            self.end_headers()

    with serving(Redirected) as url:
        assert Server(url, 60).post("/307") == "log in"
        for path in ("/302", "/303", "/302-nowhere", "/300-nowhere"):
            with pytest.raises(SinkError, match=rf"POST {url}{path} was refused: found HTTP 30\d"):
                Server(url, 60).post(path)


def test_urls_of_one_server_are_one():
    for urls in ([], ["http://a:1", "http://a:1/"], ["http://a", "http://A:80"], ["https://a/x/", "https://a:443/x"]):
        with pytest.raises(UsageError, match="no servers of an engine: expected one or more URLs, each once"):
            servers_at(urls, 5)
    assert len(servers_at(["http://a:1", "http://a:2", "https://a:1", "http://a:1/x"], 5)) == 4
