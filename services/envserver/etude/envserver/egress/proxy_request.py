"""Parser of requests to the proxy, from clients that may be hostile."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import h11

from etude.envserver.egress.policy import EgressRequest

_HOST = r"(?P<host>[^\s/?#@:\[\]\\%]{1,255}|\[[0-9A-Fa-f:.%a-z]{1,80}\])"
_AUTHORITY = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})")
_ABSOLUTE = re.compile(
    rf"http://{_HOST}(:(?P<port>\d{{1,5}}))?(?P<path>/[!-\"$->@-~]*)?(?P<query>\?[!-\"$-~]*)?",
    re.IGNORECASE,
)
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"proxy-authorization", b"proxy-authenticate", b"expect"),
        *(b"host", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"),
    }
)
"""Headers about one connection or about the client: they are not forwarded."""
_OVERRIDES = frozenset(
    {
        *(b"x-original-url", b"x-original-uri", b"x-rewrite-url", b"x-forwarded-prefix"),
        *(b"x-http-method-override", b"x-http-method", b"x-method-override"),
    }
)
"""Headers that tell some servers another path or method than those of the request."""

Headers = Sequence[tuple[bytes, bytes]]


class MalformedError(ValueError):
    """The request is not one to a proxy."""


class ProxyRequest(NamedTuple):
    """A request to the proxy."""

    attempt: EgressRequest
    target: str
    """Path and query, as the server gets them."""


def parse_request(request: h11.Request) -> ProxyRequest:
    """Parse a request.

    Raises:
        MalformedError: it is not a request to a proxy.
    """
    target = request.target.decode("ascii", "replace")
    method = request.method.decode("ascii", "replace")
    if method == "CONNECT":
        match = _AUTHORITY.fullmatch(target)
        if match is None:
            raise MalformedError("CONNECT wants host:port")
        host, port = match["host"], int(match["port"])
        return ProxyRequest(EgressRequest(host=host, port=port, method=method), "")
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise MalformedError("this is a proxy: ask for http://host/path, or CONNECT host:port")
    path = match["path"] or "/"
    port = int(match["port"] or 80)
    attempt = EgressRequest(host=match["host"], port=port, method=method, path=path)
    return ProxyRequest(attempt, path + (match["query"] or ""))


def forwarded_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers to forward to the other side."""
    given = [(name.lower(), value) for name, value in headers]
    named = {
        option.strip().lower()
        for name, value in given
        if name == b"connection"
        for option in value.split(b",")
    }
    # The length of a body belongs to its message, even if the sender lists it under Connection.
    dropped = _HOP_BY_HOP | (named - {b"content-length", b"content-encoding", b"content-type"})
    return [(name, value) for name, value in given if name not in dropped]


def outgoing_headers(
    headers: Iterable[tuple[bytes, bytes]], *, is_limited: bool
) -> list[tuple[bytes, bytes]]:
    """Headers of a request to forward to the server.

    Args:
        headers: as the client sent them.
        is_limited: whether a rule holds the request to more than its host.
    """
    dropped = _OVERRIDES if is_limited else frozenset()
    # Behind CGI and its successors X_A is X-A, which may be one that is dropped or replaced.
    kept = [each for each in forwarded_headers(headers) if b"_" not in each[0]]
    return [each for each in kept if each[0] not in dropped]


def is_chunked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if the body comes in chunks."""
    return any(name.lower() == b"transfer-encoding" for name, _ in headers)
