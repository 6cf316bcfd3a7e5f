"""A store that a host reads by grants, which may answer anything."""

import http.server
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from etude.common.blobs import DeniedError, MissingError, ShortReadError
from etude.common.errors import InvalidFieldError, StoreError
from etude.envserver.read_grants import granted_reads
from etude.envserver.read_grants.granted_reads import GrantedReads
from etude.envserver.read_grants.granted_store import GrantedStore
from etude.v1 import environments_pb2

CONTENT = b"0123456789"
Answer = Callable[[http.server.BaseHTTPRequestHandler, int, int], None]


@dataclass(slots=True)
class Web:
    """A web server whose answers a test chooses by path, and the grants for its objects."""

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    asked: list[environments_pb2.GrantReadsRequest] = field(default_factory=list)
    lifetime_s: int = 300

    def ask(
        self, request: environments_pb2.GrantReadsRequest
    ) -> environments_pb2.GrantReadsResponse:
        self.asked.append(request)
        grants = [
            environments_pb2.ReadGrant(key=key, size=len(CONTENT), url=f"{self.url}/{key}?secret")
            for key in request.keys or sorted(self.answers)
            if key in self.answers
        ]
        return environments_pb2.GrantReadsResponse(grants=grants, lifetime_seconds=self.lifetime_s)


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            key = self.path.lstrip("/").partition("?")[0]
            made.requests.append((key, dict(self.headers)))
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            made.answers[key](self, int(first), int(last))

        @override
        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


def send(
    handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str
) -> None:
    handler.send_response(status)
    for name, value in {"content_length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def honest(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
    send(handler, 206, CONTENT[first : last + 1])


def test_requests_carry_a_range_and_no_credential(web: Web) -> None:
    web.answers["a"] = honest
    store = GrantedStore("s3://bucket/prefix", web.ask)
    assert (store.get("a"), store.get_range("a", 2, 3)) == (CONTENT, b"234")
    assert [headers["Range"] for _, headers in web.requests] == ["bytes=0-9", "bytes=2-4"]
    assert not any("Authorization" in headers for _, headers in web.requests)
    assert [list(each.keys) for each in web.asked] == [["a"]]


def too_long(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
    del first, last
    send(handler, 206, CONTENT * 100_000)


def too_short(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
    del last
    send(handler, 206, CONTENT[first : first + 1])


def packed(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
    del first, last
    send(handler, 206, b"x" * 10, content_encoding="gzip")


def elsewhere(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
    del first, last
    send(handler, 302, b"", location="/b")


def whole(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
    """As a server answers that knows no ranges."""
    del first, last
    send(handler, 200, CONTENT)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(too_long, ShortReadError), (too_short, ShortReadError), (elsewhere, StoreError)],
)
def test_a_store_that_lies_is_an_error_without_the_url(
    web: Web, answer: Answer, error: type[Exception]
) -> None:
    web.answers |= {"a": answer, "b": honest}
    with pytest.raises(error) as caught:
        GrantedStore("s3://bucket/prefix", web.ask).get("a")
    assert "s3://bucket/prefix/a" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "b" not in dict(web.requests)


def test_bytes_are_taken_as_they_are_and_a_whole_answer_serves_the_whole_alone(web: Web) -> None:
    web.answers |= {"packed": packed, "whole": whole}
    store = GrantedStore("s3://bucket/prefix", web.ask)
    assert store.get("packed") == b"x" * 10
    assert store.get("whole") == CONTENT
    with pytest.raises(StoreError, match="status 200"):
        store.get_range("whole", 2, 3)


def test_a_grant_that_is_refused_is_asked_for_once_more(web: Web) -> None:
    def refuses(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
        if len(web.asked) == 1:
            send(handler, 403, b"<Error>expired</Error>")
        else:
            honest(handler, first, last)

    web.answers |= {"a": refuses, "b": lambda h, _first, _last: send(h, 403, b"no")}
    store = GrantedStore("s3://bucket/prefix", web.ask)
    assert store.get("a") == CONTENT
    web.asked.clear()
    with pytest.raises(DeniedError, match="refuses the grant"):
        store.get("b")
    assert len(web.asked) == 2


def test_a_grant_that_ended_is_replaced_before_it_is_used(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.answers["a"] = honest
    store = GrantedStore("s3://bucket/prefix", web.ask)
    assert store.get_range("a", 0, 1) == b"0"
    now_s = time.monotonic()
    monkeypatch.setattr(
        "etude.envserver.read_grants.granted_store.time.monotonic", lambda: now_s + 290
    )
    assert store.get_range("a", 1, 1) == b"1"
    assert len(web.asked) == 2


def test_a_failing_store_is_asked_again_and_an_absent_object_is_said_to_be(web: Web) -> None:
    def fails_twice(handler: http.server.BaseHTTPRequestHandler, first: int, last: int) -> None:
        if len(web.requests) < 3:
            send(handler, 503, b"slow down")
        else:
            honest(handler, first, last)

    web.answers |= {"a": fails_twice, "b": lambda h, _first, _last: send(h, 404, b"")}
    store = GrantedStore("s3://bucket/prefix", web.ask)
    assert store.get("a") == CONTENT
    for key in ("b", "unknown"):
        with pytest.raises(MissingError):
            store.get(key)
    with pytest.raises(InvalidFieldError):
        store.get("../a")


def test_a_store_that_is_away_is_unavailable() -> None:
    def ask(
        request: environments_pb2.GrantReadsRequest,
    ) -> environments_pb2.GrantReadsResponse:
        grant = environments_pb2.ReadGrant(key="a", size=1, url="http://127.0.0.1:9/a?secret")
        return environments_pb2.GrantReadsResponse(grants=[grant], lifetime_seconds=300)

    with pytest.raises(StoreError) as caught:
        GrantedStore("s3://bucket/prefix", ask).get("a")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/a", "gopher:x"])
def test_urls_of_other_schemes_are_refused(url: str) -> None:
    def ask(
        request: environments_pb2.GrantReadsRequest,
    ) -> environments_pb2.GrantReadsResponse:
        grant = environments_pb2.ReadGrant(key="a", size=1, url=url)
        return environments_pb2.GrantReadsResponse(grants=[grant], lifetime_seconds=300)

    with pytest.raises(StoreError):
        GrantedStore("s3://bucket/prefix", ask).get("a")


def test_copies_that_were_not_used_for_long_are_removed(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granted_reads, "MOST_COPIES", 2)
    web.answers["a"] = honest
    reads = GrantedReads(web.ask)
    copies = []
    for number in range(4):
        with reads.visit_folder(f"s3://bucket/task-{number}", tmp_path) as copy:
            assert (copy / "a").read_bytes() == CONTENT
        os.utime(copy.parent, (number, number))
        copies.append(copy)
        assert reads.local_folder("s3://bucket/task-0", tmp_path) == copies[0]
    assert [copy.exists() for copy in copies] == [True, False, False, True]
