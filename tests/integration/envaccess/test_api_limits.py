"""What the edge refuses, and what it says when it does."""

import contextlib
import gzip
import json
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

Edge = Any  # the fixture's class lives in conftest, which test modules cannot import
LIMIT_S = 60


class Reply(NamedTuple):
    status: int
    body: bytes


def ask(
    url: str, data: bytes | None = None, headers: Mapping[str, str] | None = None, method: str = ""
) -> Reply:
    request = urllib.request.Request(url, data, dict(headers or {}), method=method or None)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return Reply(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read())


@pytest.fixture
def made(edge: Edge) -> Iterator[dict[str, Any]]:
    reply = ask(f"{edge.url}/v2/sandboxes", b'{"templateID": "python"}', {"X-API-KEY": edge.key})
    assert reply.status == 201, reply
    sandbox = json.loads(reply.body)
    yield sandbox
    ask(f"{edge.url}/sandboxes/{sandbox['sandboxID']}", None, {"X-API-KEY": edge.key}, "DELETE")


def of(sandbox: Mapping[str, Any], **changes: str) -> dict[str, str]:
    headers = {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "X-Access-Token": sandbox["envdAccessToken"],
        "Content-Type": "application/json",
    }
    return headers | {name.replace("_", "-"): value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/sandboxes"),
        ("GET", "/v2/sandboxes"),
        ("GET", "/sandboxes/x"),
        ("DELETE", "/sandboxes/x"),
        ("POST", "/sandboxes/x/timeout"),
        ("POST", "/sandboxes/x/pause"),
        ("POST", "/v2/sandboxes/x/connect"),
        ("GET", "/openenv/wrong/python/health"),
        ("POST", "/openenv/wrong/python/mcp"),
    ],
)
def test_nothing_is_done_without_a_key(edge: Edge, method: str, path: str) -> None:
    body = b"{}" if method == "POST" else None

    assert ask(edge.url + path, body, {}, method).status == 401


def test_another_token_opens_no_sandbox(edge: Edge, made: dict[str, Any]) -> None:
    for token in ("", "x", made["toolsAccessToken"], edge.key, made["sandboxID"]):
        headers = of(made, X_Access_Token=token)
        for path in ("/process.Process/List", "/filesystem.Filesystem/Stat"):
            reply = ask(edge.url + path, b"{}", headers)
            assert (reply.status, json.loads(reply.body)["code"]) == (401, "unauthenticated")
        assert ask(f"{edge.url}/files?path=x", None, headers).status == 401


def test_the_tools_token_opens_the_tools_alone(edge: Edge, made: dict[str, Any]) -> None:
    token = made["toolsAccessToken"]

    assert ask(f"{edge.url}/v2/sandboxes", None, {"X-API-KEY": token}).status == 401
    assert ask(f"{edge.url}/openenv/{token}/python/health").status == 401


@pytest.mark.parametrize("token", ["", "Bearer ", "Bearer x", "Basic x"])
def test_tools_are_not_called_without_a_token(edge: Edge, made: dict[str, Any], token: str) -> None:
    message = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
    headers = {"Authorization": token, "Content-Type": "application/json"}

    assert ask(f"{edge.url}/mcp/{made['sandboxID']}", message, headers).status == 401


def test_another_key_calls_no_tools(edge: Edge, made: dict[str, Any]) -> None:
    for key in (edge.other_key, edge.tools_key):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        assert ask(f"{edge.url}/mcp/{made['sandboxID']}", b"{}", headers).status == 404


def test_a_body_above_the_limit_is_refused(edge: Edge, made: dict[str, Any]) -> None:
    headers = {"X-API-KEY": edge.key}
    large = json.dumps({"templateID": "x" * (1 << 20)}).encode()

    assert ask(f"{edge.url}/v2/sandboxes", large, headers).status == 413
    file = bytes((8 << 20) + 1)
    sent = {**of(made), "Content-Type": "application/octet-stream"}
    assert ask(f"{edge.url}/files?path=big", file, sent).status == 400
    assert ask(f"{edge.url}/files?path=big", bytes(10 << 20), sent).status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0\0\0\0\5{}",
        struct.pack(">BI", 0, 2**32 - 1) + b"{}",
        struct.pack(">BI", 1, 2) + b"{}",
        struct.pack(">BI", 0, 2) + b"[]",
        struct.pack(">BI", 0, 100_000) + b"[" * 100_000,
    ],
)
def test_a_message_that_is_none_is_refused(edge: Edge, made: dict[str, Any], body: bytes) -> None:
    headers = of(made, Content_Type="application/connect+json")

    reply = ask(f"{edge.url}/process.Process/Start", body, headers)

    assert (reply.status, json.loads(reply.body)["code"]) == (400, "invalid_argument")


@pytest.mark.parametrize(
    ("method", "content"),
    [
        ("Start", {"process": "x"}),
        ("Start", {"process": {"cmd": "true", "args": "x"}}),
        ("Start", {"process": {"cmd": ""}}),
        ("Start", {"process": {"cmd": "true", "cwd": "/etc"}}),
        ("Start", {"process": {"cmd": "true", "envs": {"A": 1}}}),
        ("Start", {"process": {"cmd": "true"}, "pty": {"size": {"rows": 100_000}}}),
        ("SendInput", {"process": {"pid": 1}, "input": {"stdin": "!"}}),
        ("SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGSTOP"}),
        ("SendSignal", {"process": {"pid": -1}, "signal": "SIGNAL_SIGKILL"}),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(
    edge: Edge, made: dict[str, Any], method: str, content: Mapping[str, Any]
) -> None:
    url = f"{edge.url}/process.Process/{method}"

    reply = ask(url, json.dumps(content).encode(), of(made))

    assert (reply.status, json.loads(reply.body)["code"]) in {
        (400, "invalid_argument"),
        (404, "not_found"),
    }


def test_a_method_that_is_not_there_is_said_to_be_missing(edge: Edge, made: dict[str, Any]) -> None:
    for path in ("/process.Process/Nope", "/filesystem.Filesystem/WatchDir"):
        reply = ask(edge.url + path, b"{}", of(made))
        assert (reply.status, json.loads(reply.body)["code"]) == (404, "unimplemented")


def test_what_is_unpacked_is_bounded_too(edge: Edge, made: dict[str, Any]) -> None:
    headers = of(made, Content_Type="application/octet-stream", Content_Encoding="gzip")
    bomb = gzip.compress(bytes(100 << 20))

    reply = ask(f"{edge.url}/files?path=bomb", bomb, headers)

    assert reply.status == 400
    assert b"8 MiB" in reply.body
    assert ask(f"{edge.url}/files?path=half", bomb[:100], headers).status == 400


def connected(edge: Edge) -> socket.socket:
    host, port = edge.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def test_connections_that_do_not_ask_are_closed(edge: Edge) -> None:
    with contextlib.ExitStack() as stack:
        waiting = []
        for sent in (b"", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nA: "):
            connection = stack.enter_context(connected(edge))
            connection.sendall(sent)
            waiting.append(connection)

        assert [connection.recv(1024) for connection in waiting] == [b""] * 3


@pytest.mark.parametrize("sent", [b"\0\1\2\3\r\n\r\n", b"GET /\r\n\r\n", b"A" * 100_000])
def test_what_is_no_http_is_refused(edge: Edge, sent: bytes) -> None:
    with connected(edge) as connection:
        connection.sendall(sent)

        assert connection.recv(1024).split(b"\r\n")[0] in {b"HTTP/1.1 400 Bad Request", b""}


def test_no_answer_shows_where_we_are(edge: Edge, made: dict[str, Any]) -> None:
    headers = {"X-API-KEY": edge.key}
    answers = [
        ask(f"{edge.url}/nothing"),
        ask(f"{edge.url}/v2/sandboxes", b"{", headers),
        ask(f"{edge.url}/v2/sandboxes", b'{"templateID": "x"}', headers),
        ask(f"{edge.url}/files?path=%00", None, of(made)),
        ask(f"{edge.url}/files?path=/proc/self/environ", None, of(made)),
        ask(f"{edge.url}/v2/sandboxes?limit=x", None, headers),
    ]

    assert all(400 <= answer.status < 500 for answer in answers), answers
    for answer in answers:
        assert b"Traceback" not in answer.body
        assert b".py" not in answer.body
        assert str(edge.folder).encode() not in answer.body


def test_the_log_holds_no_key(edge: Edge, made: dict[str, Any]) -> None:
    ask(f"{edge.url}/openenv/{edge.key}/python/health")

    log = edge.log()

    for secret in (edge.key, edge.tools_key, made["envdAccessToken"], made["toolsAccessToken"]):
        assert secret not in log
