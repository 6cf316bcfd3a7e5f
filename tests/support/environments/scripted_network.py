"""Name servers and networks of tests: fixed answers, and ports of this machine."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.envserver.egress.byte_streams import ByteStream
from etude.envserver.egress.upstream import Connector, Resolver, SocketConnector


@dataclass(slots=True)
class FixedResolver(Resolver):
    """A resolver with fixed answers; of several answers, each look-up takes the next."""

    names: Mapping[str, Sequence[Sequence[str]]]
    asked: list[str] = field(default_factory=list)
    """Names that were looked up."""

    @override
    async def addresses(self, host: str) -> Sequence[str]:
        answers = self.names.get(host)
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "there is no such host")
        turn = self.asked.count(host)
        self.asked.append(host)
        return answers[min(turn, len(answers) - 1)]


@dataclass(slots=True)
class RedirectingConnector(Connector):
    """A connector that redirects known addresses to ports of this machine."""

    ports: Mapping[tuple[str, int], int]
    """By address and port."""
    by: Connector = field(default_factory=SocketConnector)
    reached: list[tuple[str, int]] = field(default_factory=list)

    @override
    async def connect(self, address: str, port: int, *, tls_name: str | None) -> ByteStream:
        there = self.ports.get((address, port))
        if there is None:
            raise ConnectionRefusedError(f"no listener at {address} port {port}")
        self.reached.append((address, port))
        return await self.by.connect("127.0.0.1", there, tls_name=tls_name)
