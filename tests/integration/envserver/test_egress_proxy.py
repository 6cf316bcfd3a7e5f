"""The proxy against clients that say whatever they like, and the way to the servers behind it."""

import asyncio
import hashlib
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.support.environments.scripted_network import FixedResolver, RedirectingConnector
from tests.support.environments.upstreams import SHOP, World

from etude.envserver.egress import limits
from etude.envserver.egress.byte_streams import ByteStream, SocketStream
from etude.envserver.egress.environment_egress import EnvironmentEgress
from etude.envserver.egress.proxy import serve_connection
from etude.envserver.egress.upstream import (
    Connector,
    Resolver,
    SocketConnector,
    SystemResolver,
)

LIMIT_S = 60.0
RULES: Mapping[str, object] = {
    "egress": "Custom",
    "rules": [
        {"name": "shop", "host": "shop.example.com", "port": 80, "mode": "Http"},
        {"name": "files", "host": "files.example.org"},
        {"name": "api", "host": "api.example.com", "mode": "Https"},
        {"name": "rebinding", "host": "rebinding.example.com", "port": 80, "mode": "Http"},
        {
            "name": "limited",
            "host": "shop.example.com",
            "port": 8080,
            "mode": "Http",
            "methods": ["GET"],
        },
    ],
}
CONNECT = b"CONNECT files.example.org:443 HTTP/1.1\r\nHost: files.example.org:443\r\n\r\n"


@pytest.fixture
def gate(world: World) -> EnvironmentEgress:
    made = world.egress(RULES).for_environment("t", "a")
    assert made is not None
    return made


class Client:
    """A connection to the proxy, and the proxy's end of it."""

    def __init__(self, mine: socket.socket, serving: "asyncio.Task[None]") -> None:
        self.socket, self.serving = mine, serving

    async def ask(self, data: bytes) -> bytes:
        """Say this, and everything that comes back until the proxy is done."""
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(self._send(data))
        found = b""
        async with asyncio.timeout(LIMIT_S):
            while more := await loop.sock_recv(self.socket, 65536):
                found += more
            await asyncio.wait([sending])
        self.socket.close()
        await self.serving
        return found

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)
        self.socket.shutdown(socket.SHUT_WR)


async def client(gate: EnvironmentEgress) -> Client:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)  # noqa: FBT003 - the only way to say it
    reader, writer = await asyncio.open_connection(sock=theirs)
    return Client(mine, asyncio.create_task(serve_connection(SocketStream(reader, writer), gate)))


async def asked(gate: EnvironmentEgress, data: bytes) -> bytes:
    return await (await client(gate)).ask(data)


def tls(world: World, name: str) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(world.ca))
    made = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        made.do_handshake()
    return made, incoming, outgoing


async def test_a_first_message_in_the_same_packet_is_part_of_the_tunnel(
    gate: EnvironmentEgress, world: World
) -> None:
    _, _, outgoing = tls(world, "files.example.org")
    mine = await client(gate)
    loop = asyncio.get_running_loop()

    await loop.sock_sendall(mine.socket, CONNECT + outgoing.read())

    found = b""
    async with asyncio.timeout(LIMIT_S):
        while b"\x16\x03" not in found:  # the server's handshake
            found += await loop.sock_recv(mine.socket, 65536)
    assert found.startswith(b"HTTP/1.1 200")
    mine.socket.close()
    await mine.serving


@pytest.mark.parametrize("name", ["evil.example.net", "shop.example.com"])
async def test_a_tunnel_is_for_no_other_host_behind_the_same_address(
    gate: EnvironmentEgress, world: World, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    _, _, outgoing = tls(world, name)
    with caplog.at_level("INFO"):
        said = await asked(gate, CONNECT + outgoing.read())
    assert b"\x16\x03" not in said
    assert "verdict=not_tls rule=files" in caplog.text
    assert "sent=0 received=0" in caplog.text


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"\0" * 100])
async def test_a_tunnel_carries_nothing_but_tls(
    gate: EnvironmentEgress, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    with caplog.at_level("INFO"):
        await asked(gate, CONNECT + data)
    assert "verdict=not_tls" in caplog.text
    assert "sent=0" in caplog.text


GET = b"GET http://shop.example.com/one HTTP/1.1\r\nHost: shop.example.com\r\n"
SECOND = b"GET http://evil.example.net/two HTTP/1.1\r\nHost: evil.example.net\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        GET + b"\r\n" + SECOND,
        GET + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
        GET + b"Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + SECOND,
        GET + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n" + SECOND,
        GET + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SECOND,
        GET + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + SECOND,
        GET + b"X: a\r\n Content-Length: 80\r\n\r\n" + SECOND,
        GET + b"Host: evil.example.net\r\n\r\n",
        GET + b"X: a\nHost: evil.example.net\r\n\r\n",
        GET + b"X: a\rHost: evil.example.net\r\n\r\n",
        GET + b"Connection: content-length\r\nContent-Length: 3\r\n\r\nabc" + SECOND,
        b"GET http://shop.example.com/one HTTP/1.1\r\nHost: evil.example.net\r\n\r\n",
        b"GET http://shop.example.com/one HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + SECOND,
        b"GET  http://shop.example.com/one HTTP/1.1\r\n\r\n",
        b"\r\n\r\n" + GET + b"\r\n" + SECOND,
    ],
)
async def test_nothing_is_smuggled_behind_a_request(
    gate: EnvironmentEgress, world: World, data: bytes
) -> None:
    await asked(gate, data)

    assert len(world.seen) <= 1
    for seen in world.seen:
        assert (seen.target, seen.headers["host"]) == ("/one", "shop.example.com")
        assert b"evil" not in seen.body


async def test_only_a_rule_without_limits_lets_a_request_name_another_method(
    gate: EnvironmentEgress, world: World
) -> None:
    for port in (80, 8080):
        head = b"GET http://shop.example.com:%d/x HTTP/1.1\r\nHost: a\r\n" % port
        await asked(gate, head + b"X-HTTP-Method-Override: DELETE\r\n\r\n")

    first, second = world.seen
    assert first.headers["x-http-method-override"] == "DELETE"
    assert "x-http-method-override" not in second.headers


async def test_bodies_arrive_as_they_were_sent(gate: EnvironmentEgress, world: World) -> None:
    body = bytes(range(256)) * 1000
    head = b"POST http://shop.example.com/upload HTTP/1.1\r\nHost: a\r\n"
    chunked = b"".join(
        b"%x\r\n%s\r\n" % (len(piece), piece)
        for piece in (body[at : at + 9999] for at in range(0, len(body), 9999))
    )

    first = await asked(gate, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    second = await asked(
        gate, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n"
    )

    assert first.endswith(b"\r\n\r\n256000\n")
    assert second.endswith(b"256000\n")
    assert [hashlib.sha256(seen.body).digest() for seen in world.seen] == [
        hashlib.sha256(body).digest()
    ] * 2


async def test_answers_of_every_kind_come_back(gate: EnvironmentEgress) -> None:
    head = await asked(gate, b"HEAD http://shop.example.com/x HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"content-length: 20" in head
    assert head.endswith(b"\r\n\r\n")
    chunked = await asked(gate, b"GET http://shop.example.com/chunked HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"transfer-encoding: chunked" in chunked.lower()
    assert b"hello from the shop" in chunked
    old = await asked(gate, b"GET http://shop.example.com/chunked HTTP/1.0\r\n\r\n")
    assert old.endswith(b"\r\n\r\nhello from the shop\n")
    waits = b"POST http://shop.example.com/upload HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
    said = await asked(gate, waits + b"Content-Length: 2\r\n\r\nab")
    assert said.endswith(b"2\n")


async def test_a_name_behind_which_another_server_is_gets_no_request(
    gate: EnvironmentEgress, world: World
) -> None:
    """A server that does not prove the rule's name never sees the credential's request."""
    stranger = SocketConnector()  # believes no test CA
    gate.upstream.connector = RedirectingConnector({(SHOP, 443): world.https_port}, stranger)

    said = await asked(gate, b"GET http://api.example.com/v1 HTTP/1.1\r\nHost: a\r\n\r\n")

    assert said.startswith(b"HTTP/1.1 502")
    assert world.seen == []


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nX Echo: %s\r\n\r\n",
        b"%s\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: %s\0\r\n\r\n",
    ],
)
async def test_no_word_of_a_server_that_speaks_no_http_is_logged(
    gate: EnvironmentEgress, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    """It may be the credential that it was sent."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said % b"s3cret-token-12345")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        gate.upstream.connector = RedirectingConnector({(SHOP, 80): port})
        with caplog.at_level("INFO"):
            found = await asked(gate, b"GET http://shop.example.com/x HTTP/1.1\r\nHost: a\r\n\r\n")

    assert b"s3cret" not in found
    assert "s3cret" not in caplog.text
    assert "why='not HTTP: RemoteProtocolError'" in caplog.text


async def test_a_name_that_changes_its_mind_is_checked_anew(
    gate: EnvironmentEgress, world: World
) -> None:
    gate.lookups.kept_s = 0.0
    ask = b"GET http://rebinding.example.com/ HTTP/1.1\r\nHost: a\r\n\r\n"

    said = [(await asked(gate, ask)).split()[1] for _ in range(2)]

    assert said == [b"200", b"403"]
    assert world.names.asked == ["rebinding.example.com"] * 2


async def test_every_attempt_is_taken_from_the_bucket(gate: EnvironmentEgress) -> None:
    # It refills slowly here: a busy machine may need seconds for three attempts.
    gate.account._attempts = replace(gate.account._attempts, rate_per_s=0.001)
    for data in (b"GET http://shop.example.com/x HTTP/1.1\r\nHost: a\r\n\r\n", b"garbage", b""):
        await asked(gate, data)

    assert gate.account.wait_s(time.monotonic()) == 0.0
    assert gate.account._attempts.tokens < limits.BURST - 3


async def test_bytes_that_are_used_up_end_an_exchange_wherever_it_stands(
    gate: EnvironmentEgress, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"%s HTTP/1.1\r\nHost: a\r\n"
    post = head % b"POST http://shop.example.com/upload" + b"Content-Length: 90000\r\n\r\n"
    get = head % b"GET http://shop.example.com/big?1048576" + b"\r\n"
    hello = tls(world, "files.example.org")[2].read()
    gate.account.max_bytes = 50_000
    ends = []
    for data in (get, post + bytes(90_000), CONNECT + hello):
        caplog.clear()
        gate.account.num_bytes = 49_999 if data.startswith(CONNECT) else 0
        with caplog.at_level("INFO"):
            ends.append(await asked(gate, data))
        assert "verdict=limit" in caplog.text
        assert "used up its bytes" in caplog.text
    assert ends[0].startswith(b"HTTP/1.1 200")
    assert len(ends[0]) <= 50_000
    assert ends[1].startswith(b"HTTP/1.1 429")


async def test_a_log_line_is_one_line(
    gate: EnvironmentEgress, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await asked(gate, b"GET http://a/verdict=allowed HTTP/1.1\r\nHost: a\r\n\r\n")
        await asked(gate, b"X=Y CONNECT HTTP/1.1\r\nHost: a\r\n\r\n")
        await asked(gate, b"GET http://a\xff/ HTTP/1.1\r\nHost: a\r\n\r\n")
    lines = [record.getMessage() for record in caplog.records if "egress lease" in record.msg]
    assert len(lines) == 3
    assert all("\n" not in line and line.count("verdict=") == 1 for line in lines)


@pytest.mark.parametrize(
    "resolver", [SystemResolver(), FixedResolver({"localhost": [["127.0.0.1"]]})]
)
async def test_resolvers_fail_for_hosts_that_there_are_not(resolver: Resolver) -> None:
    with pytest.raises(socket.gaierror):
        await resolver.addresses("no-such-host.invalid")


@pytest.mark.parametrize(
    "resolver", [SystemResolver(), FixedResolver({"localhost": [["127.0.0.1"]]})]
)
async def test_resolvers_answer_with_addresses(resolver: Resolver) -> None:
    try:
        found = await resolver.addresses("localhost")
    except socket.gaierror:
        pytest.skip("this machine looks complete names up in its network only, and has none")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert found


@pytest.mark.parametrize("is_detour", [False, True])
async def test_connectors_reach_servers_that_prove_their_name(
    world: World, *, is_detour: bool
) -> None:
    direct = SocketConnector(ssl.create_default_context(cafile=str(world.ca)))
    ports = {("127.0.0.1", port): port for port in (world.http_port, world.https_port)}
    connector: Connector = RedirectingConnector(ports, direct) if is_detour else direct

    plain = await connector.connect("127.0.0.1", world.http_port, tls_name=None)
    assert b"hello" in await _exchanged(plain)
    secured = await connector.connect("127.0.0.1", world.https_port, tls_name="api.example.com")
    assert b"hello" in await _exchanged(secured)
    with pytest.raises(OSError, match=r"other\.example\.com"):
        await connector.connect("127.0.0.1", world.https_port, tls_name="other.example.com")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await connector.connect("127.0.0.1", closed.getsockname()[1], tls_name=None)


async def _exchanged(wire: ByteStream) -> bytes:
    await wire.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    found = b""
    while data := await wire.read():
        found += data
    await wire.close()
    return found
