"""HTTP protocol with a time limit on request headers."""

import asyncio
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""From a connection's start, or from the first byte of a request, to the end of its headers."""


class PatientProtocol(H11Protocol):
    """Closes connections that send their headers too slowly; uvicorn has no such limit."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    @override
    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and self._timer is None:
            self._wait()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
