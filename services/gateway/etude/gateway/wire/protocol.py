"""Interface of one protocol of clients."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from etude.gateway.turn_request import FinishedTurn, TextPiece, TurnRequest, TurnStart

Body = Mapping[str, Any]


class StreamWriter(Protocol):
    """Writes one answer as server-sent events."""

    def start(self, start: TurnStart) -> bytes:
        """Events at the beginning."""
        ...

    def write(self, piece: TextPiece) -> bytes:
        """Events of a piece of text."""
        ...

    def finish(self, turn: FinishedTurn) -> bytes:
        """Events at the end."""
        ...

    def fail(self, status: int, message: str) -> bytes:
        """Events of an error after the beginning."""
        ...


class WireProtocol(Protocol):
    """One protocol: reads requests, writes answers."""

    keep_alive: bytes
    """Sent where a stream is silent, so that no proxy takes it for dead."""

    def read_request(self, body: Body) -> TurnRequest:
        """Read a request.

        Raises:
            InvalidFieldError: names the first wrong field.
        """
        ...

    def write_answer(self, model: str, turn: FinishedTurn) -> Mapping[str, object]:
        """The answer to a client that does not stream."""
        ...

    def open_stream(self, model: str, request: TurnRequest) -> StreamWriter:
        """Open the answer to a client that streams."""
        ...

    def write_error(self, status: int, message: str) -> Mapping[str, object]:
        """The answer to a request that failed."""
        ...


def write_data(value: object) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + _encode(value) + b"\n\n"


def write_event(name: str, value: object) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + write_data(value)


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
