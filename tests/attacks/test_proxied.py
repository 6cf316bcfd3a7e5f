"""That an attack on the proxy notices whatever is no refusal, and nothing else."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.attacks.arena import REACHED
from tests.attacks.proxied import PROXIED, PROXY
from tests.support.environments.scripted_network import FixedResolver, RedirectingConnector

from etude.common.api.pool.network import Network
from etude.envserver.egress.byte_streams import SocketStream
from etude.envserver.egress.environment_egress import PoolEgress
from etude.envserver.egress.proxy import serve_connection
from etude.envserver.egress.upstream import Upstream

HARMLESS = "two dozen connections that say nothing"
"""It reads no answers: what it might harm is the node."""
ATTACKS = sorted(set(PROXY) - {HARMLESS})
REFUSED = "HTTP/1.1 {} Refused\r\n\r\netude refuses: {}: why\n"
OTHERS = {
    "a page": "HTTP/1.1 200 OK\r\n\r\nhello",
    "a server that does not answer": "HTTP/1.1 502 Refused\r\n\r\nno",
    "limits": REFUSED.format(429, "limit"),
    "two answers": REFUSED.format(403, "not_listed") + REFUSED.format(403, "not_listed"),
    "another protocol": "SSH-2.0-OpenSSH\r\n",
    "nothing": "",
}
CASES = [
    (attack, answer)
    for attack in ATTACKS
    for answer in OTHERS
    # Whoever goes on sending may be closed before it reads its refusal.
    if (attack, answer) != ("garbage for the proxy", "nothing")
]
_CLIENT = """#!{python}
import socket, sys
s = socket.create_connection(("127.0.0.1", {port}), 30)
try:
    s.sendall(sys.stdin.buffer.read())
    s.shutdown(1)
    sys.stdout.buffer.write(s.makefile("rb").read())
except OSError:
    pass
"""


async def said(tools: Path, client: str, attack: str) -> str:
    """What an attack prints whose connections this program makes."""
    (tools / "nc").write_text(client)
    (tools / "nc").chmod(0o755)
    variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", PROXY[attack]), stdout=asyncio.subprocess.PIPE, env=variables
    )
    return (await shell.communicate())[0].decode()


@pytest.mark.parametrize(("attack", "answer"), CASES)
async def test_whatever_is_no_refusal_was_reached(tmp_path: Path, attack: str, answer: str) -> None:
    (tmp_path / "answer").write_text(OTHERS[answer])
    client = f"#!/bin/sh\ncat >/dev/null; cat {tmp_path}/answer\n"
    assert REACHED in await said(tmp_path, client, attack)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_the_proxy_refuses_and_nothing_was_reached(tmp_path: Path, attack: str) -> None:
    upstream = Upstream(FixedResolver({}), RedirectingConnector({}))
    gate = PoolEgress(Network.model_validate(PROXIED), {"t": None}, upstream).for_environment(
        "t", "a"
    )
    assert gate is not None

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_connection(SocketStream(reader, writer), gate)

    async with await asyncio.start_server(connected, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        client = _CLIENT.format(python=sys.executable, port=port)
        assert REACHED not in await said(tmp_path, client, attack)
