"""Health probes over HTTP: liveness, readiness, metrics."""

import asyncio
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

READ_TIMEOUT_S = 5.0
"""A prober that opens a connection and says nothing is cut off."""


@dataclass(slots=True)
class Probes:
    """Serves /livez, /readyz and /metrics.

    /livez answers whenever the event loop turns: a dead dependency must not fail it.
    """

    port: int
    """0 picks a free port; after start() the real one."""
    host: str = "127.0.0.1"
    registry: CollectorRegistry = REGISTRY
    ready: bool = False
    _server: asyncio.Server | None = field(default=None, init=False)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer(request.split(b" ", 2)[1].decode("latin-1")))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return
        except IndexError:
            writer.write(_response("400 Bad Request", b"no request line\n"))
        finally:
            writer.close()

    def _answer(self, path: str) -> bytes:
        match path.partition("?")[0]:
            case "/livez":
                return _response("200 OK", b"ok\n")
            case "/readyz" if self.ready:
                return _response("200 OK", b"ok\n")
            case "/readyz":
                return _response("503 Service Unavailable", b"not ready\n")
            case "/metrics":
                return _response("200 OK", generate_latest(self.registry), CONTENT_TYPE_LATEST)
            case _:
                return _response("404 Not Found", b"try /livez, /readyz or /metrics\n")


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
