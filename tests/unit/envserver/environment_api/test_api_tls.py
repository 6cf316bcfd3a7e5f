"""Encryption of the environment API: keys of clients do not cross a network in the clear."""

import contextlib
import http.client
import ipaddress
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from tests.support import pki
from tests.support.free_ports import reserve_port

from etude.common.errors import UserError
from etude.envserver.environment_api.server import serve
from etude.envserver.environment_api.settings import EnvironmentApiSettings

LIMIT_S = 60.0


async def test_it_does_not_listen_for_others_without_a_certificate(tmp_path: Path) -> None:
    env = {
        "ETUDE_BROKER_TARGET": "127.0.0.1:1",
        "ETUDE_EDGE_KEYS": str(tmp_path / "none"),
        "ETUDE_HOST": "0.0.0.0",
        "ETUDE_PORT": "0",
    }
    with pytest.raises(UserError, match="the keys of clients would not be encrypted"):
        await serve(EnvironmentApiSettings.from_env(env))


@contextlib.contextmanager
def _serve_process(folder: Path, tls: Path, port: int) -> Iterator[None]:
    keys = folder / "keys"
    command = [sys.executable, "-m", "etude.envserver.main"]
    made = subprocess.run([*command, "key", "alice", "full"], capture_output=True, check=True)
    keys.write_bytes(made.stdout)
    env = {
        "ETUDE_BROKER_TARGET": f"127.0.0.1:{reserve_port()}",
        "ETUDE_EDGE_KEYS": str(keys),
        "ETUDE_EDGE_TLS": str(tls),
        "ETUDE_PORT": str(port),
        "ETUDE_PROBE_PORT": str(reserve_port()),
    }
    process = subprocess.Popen([*command, "edge"], env={**os.environ, **env})
    try:
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _status(connection: http.client.HTTPConnection) -> int:
    """Status of an answer, once the process listens."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            connection.request("GET", "/health", headers={"E2b-Sandbox-Id": "none"})
            return connection.getresponse().status
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s
            connection.close()
            time.sleep(0.05)


def test_clients_talk_tls_with_it_and_nothing_else(tmp_path: Path) -> None:
    authority, port = pki.Authority(), reserve_port()
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    tls = pki.write(tmp_path / "tls", authority.certify([loopback]))
    with _serve_process(tmp_path, tls, port):
        context = ssl.create_default_context(cadata=authority.pem.decode())
        secured = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
        assert _status(secured) == 502
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            _status(plain)
