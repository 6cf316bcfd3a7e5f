"""The parts of the proxy that read bytes which anybody may have written."""

import base64
import ssl
from dataclasses import replace
from pathlib import Path

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.meta import NameRef
from etude.common.api.pool.network import EgressCredential, EgressMode
from etude.envserver.egress import limits, proxy_request, tls_client_hello
from etude.envserver.egress.credentials import (
    CredentialEchoError,
    CredentialError,
    EchoGuard,
    SecretFiles,
    watched_parts,
)
from etude.envserver.egress.limits import EgressAccount
from etude.envserver.egress.policy import AllowRule
from etude.envserver.egress.proxy_request import MalformedError
from etude.envserver.egress.tls_client_hello import NotTlsError

SECRET = b"Bearer abcabcabd-secret"


def credential(secret: str, key: str) -> EgressCredential:
    """A credential that may name anything, as from a pool that was never validated."""
    name = NameRef.model_construct(name=secret)
    return EgressCredential.model_construct(header="A", secret_ref=name, key=key)


def client_hello(name: str | None) -> bytes:
    """What Python's own TLS says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = client_hello("files.example.org")


def test_a_client_names_its_server() -> None:
    assert tls_client_hello.read_hello(HELLO) == (True, "files.example.org")


@given(st.integers(0, len(HELLO) - 1))
def test_a_beginning_is_not_complete(size: int) -> None:
    assert not tls_client_hello.read_hello(HELLO[:size]).is_complete


@given(st.lists(st.integers(1, 400), max_size=8))
def test_a_message_in_many_records_is_the_same(sizes: list[int]) -> None:
    body, data = HELLO[5:], b""
    for size in (*sizes, len(body)):
        piece, body = body[:size], body[size:]
        if piece:
            data += HELLO[:3] + len(piece).to_bytes(2, "big") + piece
    assert tls_client_hello.read_hello(data) == (True, "files.example.org")


@given(st.binary(max_size=600))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        tls_client_hello.read_hello(data)
    except NotTlsError:
        return


@given(st.integers(0, len(HELLO) - 1), st.integers(0, 255))
def test_a_changed_message_is_read_or_refused(at: int, byte: int) -> None:
    data = HELLO[:at] + bytes([byte]) + HELLO[at + 1 :]
    try:
        tls_client_hello.read_hello(data)
    except NotTlsError:
        return


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00\x00"])
def test_what_is_no_tls_is_told_from_its_first_bytes(data: bytes) -> None:
    with pytest.raises(NotTlsError):
        tls_client_hello.read_hello(data)


def test_a_client_that_names_no_server_is_refused() -> None:
    with pytest.raises(NotTlsError):
        tls_client_hello.read_hello(client_hello(None))


def test_a_first_message_without_end_is_refused() -> None:
    endless = b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(0x3FFC)
    with pytest.raises(NotTlsError):
        tls_client_hello.read_hello(endless)


def request(target: str, method: str = "GET") -> h11.Request:
    return h11.Request(method=method, target=target, headers=[("host", "other.example.com")])


def test_the_target_says_where_to_and_the_host_header_nothing() -> None:
    wanted = proxy_request.parse_request(request("http://a.example.com:8080/x?y=http://b/"))
    assert (wanted.attempt.host, wanted.attempt.port) == ("a.example.com", 8080)
    assert (wanted.attempt.path, wanted.target) == ("/x", "/x?y=http://b/")
    tunnel = proxy_request.parse_request(request("a.example.com:443", "CONNECT"))
    assert (tunnel.attempt.host, tunnel.attempt.port, tunnel.attempt.is_tunnel) == (
        *("a.example.com", 443),
        True,
    )


@pytest.mark.parametrize(
    "target",
    [
        *("/", "*", "https://a.example.com/", "ftp://a/", "a.example.com:443", "http://"),
        *("http://u:p@a.example.com/", "http://a.example.com@b/", "http://a.example.com:/"),
        *("http://a.example.com:99999999/", "http://a.example.com#b", "http://a.example.com\\b"),
        *("http://a%2eexample.com/", "http://[::1/", "http://a.example.com:80:80/"),
    ],
)
def test_no_other_target_is_a_request_for_a_proxy(target: str) -> None:
    with pytest.raises(MalformedError):
        proxy_request.parse_request(request(target))


@pytest.mark.parametrize("target", ["a.example.com", "http://a:443", "a:b", ":443", "u@a:443"])
def test_no_other_target_is_a_tunnels(target: str) -> None:
    with pytest.raises(MalformedError):
        proxy_request.parse_request(request(target, "CONNECT"))


def test_headers_of_one_connection_go_no_further() -> None:
    given_ = [
        *((b"Connection", b"x-hop, Content-Length"), (b"X-Hop", b"1"), (b"X-Kept", b"2")),
        *((b"Proxy-Authorization", b"3"), (b"Content-Length", b"4"), (b"Host", b"5")),
        *((b"Upgrade", b"6"), (b"Via", b"7"), (b"X-Forwarded-For", b"8")),
    ]
    assert proxy_request.forwarded_headers(given_) == [(b"x-kept", b"2"), (b"content-length", b"4")]


def test_a_server_is_told_no_other_path_or_method_where_a_rule_limits_them() -> None:
    given_ = [
        *((b"X-Original-URL", b"/admin"), (b"X-Rewrite-Url", b"/admin"), (b"X-Kept", b"1")),
        *((b"X-HTTP-Method-Override", b"DELETE"), (b"X-HTTP-Method", b"DELETE")),
        *((b"X-Method-Override", b"DELETE"), (b"X-Forwarded-Prefix", b"/admin")),
    ]
    assert proxy_request.outgoing_headers(given_, is_limited=True) == [(b"x-kept", b"1")]
    assert len(proxy_request.outgoing_headers(given_, is_limited=False)) == len(given_)


@pytest.mark.parametrize("is_limited", [False, True])
def test_a_header_that_some_servers_take_for_another_is_dropped(*, is_limited: bool) -> None:
    given_ = [(b"Content_Length", b"3"), (b"X_Api_Key", b"a"), (b"x-a", b"1"), (b"X_A", b"2")]
    assert proxy_request.outgoing_headers(given_, is_limited=is_limited) == [(b"x-a", b"1")]


def test_a_rule_is_limited_by_whatever_it_holds_requests_to() -> None:
    free = AllowRule(name="a", host="a.example.com", mode=EgressMode.HTTPS)
    assert not free.is_limited
    assert replace(free, paths=("/v1",)).is_limited
    assert replace(free, methods=("GET",)).is_limited
    assert replace(free, credential=credential("s", "k")).is_limited


@given(st.lists(st.sampled_from([b"a", b"abc", b"x", SECRET[:9], SECRET[:-1], b"Bearer ab"])))
def test_a_watched_stream_is_passed_unchanged(pieces: list[bytes]) -> None:
    guard = EchoGuard(watched_parts(SECRET))
    whole = b"".join(pieces)
    if SECRET in whole or SECRET[7:] in whole:
        return
    assert b"".join([*(guard.filter(piece) for piece in pieces), guard.flush()]) == whole


@given(
    st.binary(max_size=20),
    st.sampled_from([SECRET, SECRET.partition(b" ")[2]]),
    st.binary(max_size=20),
    st.integers(1, 9),
)
def test_no_byte_of_a_secrets_end_is_passed(
    before: bytes, secret: bytes, after: bytes, size: int
) -> None:
    guard, passed = EchoGuard(watched_parts(SECRET)), list[bytes]()
    data = before + secret + after

    def stream() -> None:
        passed.extend(guard.filter(data[at : at + size]) for at in range(0, len(data), size))

    with pytest.raises(CredentialEchoError):
        stream()
    assert len(b"".join(passed)) <= len(before) + len(b"Bearer ")


def test_a_password_is_watched_in_every_form() -> None:
    packed = base64.b64encode(b"user:password-long")
    assert watched_parts(b"Basic " + packed) == {
        *(b"Basic " + packed, packed, b"user:password-long", b"password-long"),
    }


def test_a_secret_is_one_line_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    kept, wanted = (
        SecretFiles(tmp_path),
        credential("s", "k"),
    )
    with pytest.raises(CredentialError, match="cannot be read"):
        kept.value(wanted)
    (tmp_path / "s" / "k").write_bytes(SECRET + b"\n")
    assert kept.value(wanted) == SECRET
    for content in (b"", b"a\r\nX-Other: b", b"a\0b", b"\xff", b"x" * 9000):
        (tmp_path / "s" / "k").write_bytes(content)
        with pytest.raises(CredentialError, match="not a header value"):
            kept.value(wanted)


@pytest.mark.parametrize("secret", ["..", "a/b", "", "/etc"])
def test_a_secret_is_in_its_folder(tmp_path: Path, secret: str) -> None:
    with pytest.raises(CredentialError, match="not a name"):
        SecretFiles(tmp_path).value(credential(secret, "passwd"))


def test_without_a_folder_there_are_no_secrets() -> None:
    with pytest.raises(CredentialError, match="ETUDE_EGRESS_SECRETS"):
        SecretFiles().value(credential("s", "k"))


def test_attempts_come_back_with_time() -> None:
    account = EgressAccount(max_bytes=10)
    waits = [account.wait_s(1.0) for _ in range(int(limits.BURST) + 40)]
    assert waits[: int(limits.BURST)] == [0.0] * int(limits.BURST)
    assert waits[-40:] == sorted(waits[-40:])
    assert waits[-1] == pytest.approx(40 / limits.ATTEMPTS_PER_S)
    assert account.wait_s(100.0) == 0.0


def test_names_are_counted_once() -> None:
    account = EgressAccount(max_bytes=10)
    names = [f"{number}.example.org" for number in range(limits.MAX_NAMES)]
    assert all(account.may_name(name) for name in names)
    assert not account.may_name("one-more.example.org")
    assert account.may_name(names[0])
