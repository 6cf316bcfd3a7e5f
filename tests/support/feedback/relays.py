"""Real servers of NATS and Kafka, and relays as processes that are killed."""

import asyncio
import ipaddress
import json
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography import x509
from tests.support import needs
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess
from tests.support.free_ports import reserve_port
from tests.support.pki import Authority

ROOT = Path(__file__).parents[3]
START_S = 60.0
DONE_S = 60.0
CLUSTER = "4L6g3nShT-eMCtK--X86sw"
JAVA = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
KAFKA_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{plain}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
"""
KAFKA_TLS = """\
listeners=PLAINTEXT://127.0.0.1:{plain},SSL://127.0.0.1:{tls},SASL_SSL://127.0.0.1:{sasl},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{plain},SSL://127.0.0.1:{tls},SASL_SSL://127.0.0.1:{sasl}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT
ssl.keystore.type=PEM
ssl.keystore.location={both}
ssl.truststore.type=PEM
ssl.truststore.location={authority}
listener.name.ssl.ssl.client.auth=required
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={login} required;
"""
LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule"
USER, PASSWORD = "relay", "correct-horse"


class Certificates(NamedTuple):
    """Files of a server on this machine, or of a relay."""

    authority: Path
    certificate: Path
    key: Path
    both: Path
    """Certificate and key in one file."""

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        """Make an authority, and a certificate for 127.0.0.1."""
        folder.mkdir()
        files = Authority().certify([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        files["both"] = files["tls.crt"] + files["tls.key"]
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return cls(*(folder / name for name in ("ca.crt", "tls.crt", "tls.key", "both")))


@asynccontextmanager
async def nats_server(folder: Path, tls: Certificates | None = None) -> AsyncIterator[str]:
    """A server with JetStream on a folder, by its URL."""
    binary = _find("nats_server")
    port = reserve_port()
    words = ["-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
    if tls is not None:
        words += ["--tls", "--tlscert", str(tls.certificate), "--tlskey", str(tls.key)]
    process = await asyncio.create_subprocess_exec(
        *(str(binary), *words), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await _wait_for_port(port)
        yield f"{'tls' if tls else 'nats'}://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


class KafkaBroker(NamedTuple):
    """Addresses of one broker."""

    plain: str
    by_certificate: str
    """Over TLS, for clients with a certificate; only of a broker that has one itself."""
    by_password: str
    """Over TLS, for the user relay."""


@asynccontextmanager
async def kafka_broker(folder: Path, tls: Certificates | None = None) -> AsyncIterator[KafkaBroker]:
    """A broker of one node in KRaft mode."""
    jars = _find("kafka_jars")
    await asyncio.to_thread(folder.mkdir)
    ports = dict(
        zip(("plain", "tls", "sasl", "controller"), (reserve_port() for _ in range(4)), strict=True)
    )
    properties = KAFKA_PROPERTIES + (KAFKA_TLS if tls else "")
    files = tls._asdict() if tls else {}
    text = properties.format(folder=folder, login=LOGIN, **ports, **files)
    (folder / "server.properties").write_text(text)
    java = ("java", *JAVA, "-cp", f"{jars}/*")
    settings = str(folder / "server.properties")
    words = ("kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", settings)
    user = ("--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]")
    with (folder / "log").open("wb") as log:
        formatting = await asyncio.create_subprocess_exec(
            *java, *words, *(user if tls else ()), stdout=log, stderr=log
        )
        assert await formatting.wait() == 0, (folder / "log").read_text()
        process = await asyncio.create_subprocess_exec(
            *java, "kafka.Kafka", settings, stdout=log, stderr=log
        )
    try:
        await _wait_for_port(ports["plain"])
        yield KafkaBroker(*(f"127.0.0.1:{ports[name]}" for name in ("plain", "tls", "sasl")))
    finally:
        process.kill()
        await process.wait()


def _find(server: str) -> Path:
    place: Path = runpy.run_path(str(ROOT / "hack" / "event_servers.py"))[server]()
    if not place.exists():
        why = f"there is no {server}: `make event-servers` gets it (needs Go and Java)"
        needs.skip(why, "event-servers")
    return place


async def _wait_for_port(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def post(service: FeedbackProcess, names: list[str]) -> None:
    """Send events with these ids."""
    body = json.dumps([examples.event(id=name) for name in names])
    headers = service.headers | {"content-type": "application/cloudevents-batch+json"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        answer = await client.post(f"{service.url}/v1/events", content=body)
    assert {each["status"] for each in answer.json()["results"]} == {202}


async def until(is_done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DONE_S):
        while not await is_done():  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.1)


class Relay:
    """One relay after the other, with the same settings."""

    def __init__(self, direction: str, service: FeedbackProcess, env: Mapping[str, str]) -> None:
        key_file = service.folder / "relay.key"
        key_file.write_text(service.key)
        self.direction = direction
        self.env = {
            "PATH": os.environ["PATH"],
            "ETUDE_RELAY_URL": service.url,
            "ETUDE_RELAY_KEY_FILE": str(key_file),
            **env,
        }
        self.process: asyncio.subprocess.Process | None = None
        self.told = ""
        """Log of those that were stopped."""

    async def start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "etude.feedback.main", "relay", self.direction)
        self.process = await asyncio.create_subprocess_exec(
            *command, env=self.env, stderr=asyncio.subprocess.PIPE
        )
        return self.process

    async def stop(self, number: signal.Signals) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        _, told = await self.process.communicate()
        self.told += told.decode()
        assert self.process.returncode is not None
        return self.process.returncode
