"""Parser of a TLS ClientHello: the server name, from bytes that may be hostile.

It reads and never answers: nothing here depends on a key. RFC 8446, sections 4.1.2 and 5.1.
"""

from typing import NamedTuple

MAX_BYTES = 16 << 10
"""A client's first message; those with post-quantum keys take 2 KiB."""
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RECORD_HEADER, _MAX_RECORD = 5, 1 << 14


class NotTlsError(ValueError):
    """The bytes are not a TLS ClientHello."""


class ClientHello(NamedTuple):
    """Result of parsing the bytes so far."""

    is_complete: bool
    server_name: str = ""


class _Cursor:
    """Reads fields in order, and fails at the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise NotTlsError("a field goes beyond its message")
        found, self.at = self.data[self.at : end], end
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def is_over(self) -> bool:
        return self.at >= len(self.data)


def read_hello(data: bytes) -> ClientHello:
    """Parse the first bytes of a connection.

    Raises:
        NotTlsError: they are no TLS client's, or name no server.
    """
    message = _message(data)
    if message is None:
        if len(data) > MAX_BYTES:
            raise NotTlsError("its first message is too long")
        return ClientHello(is_complete=False)
    return ClientHello(is_complete=True, server_name=_server_name(message))


def _message(data: bytes) -> bytes | None:
    """The first handshake message, of one record or several; None if there is more to come.

    Raises:
        NotTlsError: it is none, or no client's.
    """
    handshake = b""
    at = 0
    while len(data) - at >= _RECORD_HEADER:
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != _HANDSHAKE or major != 3 or not 0 < size <= _MAX_RECORD:
            raise NotTlsError("not a handshake of TLS")
        body = data[at + _RECORD_HEADER : at + _RECORD_HEADER + size]
        handshake += body
        if handshake and handshake[0] != _CLIENT_HELLO:
            raise NotTlsError("not a client's first message")
        if len(handshake) >= 4 and len(handshake) >= 4 + int.from_bytes(handshake[1:4], "big"):
            return handshake[4 : 4 + int.from_bytes(handshake[1:4], "big")]
        if len(body) < size:
            return None
        at += _RECORD_HEADER + size
    if data and data[0] != _HANDSHAKE:
        raise NotTlsError("not a handshake of TLS")
    return None


def _server_name(message: bytes) -> str:
    hello = _Cursor(message)
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression
    if hello.is_over:
        raise NotTlsError("it names no server")
    extensions = _Cursor(hello.vector(2))
    found = []
    while not extensions.is_over:
        kind, body = extensions.number(2), extensions.vector(2)
        if kind == _SERVER_NAME:
            found += _names(body)
    if len(found) != 1:
        raise NotTlsError("it names no server, or more than one")
    return found[0]


def _names(body: bytes) -> list[str]:
    names = _Cursor(_Cursor(body).vector(2))
    found = []
    while not names.is_over:
        kind, name = names.number(1), names.vector(2)
        if kind != _HOST_NAME or not name.isascii():
            raise NotTlsError("it names its server in an unknown way")
        found.append(name.decode("ascii"))
    return found
