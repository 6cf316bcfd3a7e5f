"""Sockets that listen inside of environments, and the places of their gate."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from tests.support.environments.scripted_network import FixedResolver, RedirectingConnector
from tests.support.vm import guests

from etude.envserver.egress.credentials import SecretFiles
from etude.envserver.egress.environment_egress import EnvironmentEgress
from etude.envserver.egress.limits import MAX_CONNECTIONS, EgressAccount
from etude.envserver.egress.listeners import EgressListeners
from etude.envserver.egress.policy import AllowRule
from etude.envserver.egress.upstream import Upstream

LIMIT_S = 60.0
ASK = b"CONNECT b.example.com:443 HTTP/1.1\r\nhost: b\r\n\r\n"


@pytest.fixture
async def gate() -> EnvironmentEgress:
    upstream = Upstream(FixedResolver({}), RedirectingConnector({}))
    rules = [AllowRule(name="r", host="a.example.com")]
    return EnvironmentEgress(
        lease_id="a",
        rules=rules,
        upstream=upstream,
        secrets=SecretFiles(),
        account=EgressAccount(1 << 20),
    )


@pytest.fixture
async def doors(gate: EnvironmentEgress) -> AsyncIterator[EgressListeners]:
    made = EgressListeners()
    made.allow(gate)
    yield made
    made.close_all()


def opened(doors: EgressListeners, number: int) -> int:
    """A door more, by its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    doors.open("a", str(number), listener)
    return int(listener.getsockname()[1])


async def said(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK)
    async with asyncio.timeout(LIMIT_S):
        found = await reader.readline()
    writer.close()
    return found


async def test_a_door_where_nobody_knocks_takes_no_place(doors: EgressListeners) -> None:
    ports = [opened(doors, number) for number in range(MAX_CONNECTIONS + 4)]
    await asyncio.sleep(0)

    for port in (ports[-1], ports[0], ports[-1]):
        assert (await said(port)).startswith(b"HTTP/1.1 403")


async def test_one_that_waits_for_a_place_is_served_once_there_is_one(
    doors: EgressListeners, gate: EnvironmentEgress
) -> None:
    held = [await asyncio.open_connection("127.0.0.1", opened(doors, 0))]
    held += [
        await asyncio.open_connection("127.0.0.1", opened(doors, number))
        for number in range(1, MAX_CONNECTIONS)
    ]
    await guests.until(gate.connection_slots.locked)
    waiting = asyncio.create_task(said(opened(doors, MAX_CONNECTIONS)))
    await asyncio.sleep(0.05)
    assert not waiting.done()

    held[0][1].close()

    assert (await waiting).startswith(b"HTTP/1.1 403")
    for _, writer in held:
        writer.close()
