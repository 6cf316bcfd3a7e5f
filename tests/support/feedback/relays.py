"""Real servers of NATS and Kafka, and relays as processes that are killed."""

import asyncio
import json
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from tests.support import needs
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess, free_port

ROOT = Path(__file__).parents[3]
START_S = 60.0
DONE_S = 60.0
CLUSTER = "4L6g3nShT-eMCtK--X86sw"
JAVA = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
KAFKA_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
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


@asynccontextmanager
async def nats_server(folder: Path) -> AsyncIterator[str]:
    """A server with JetStream on a folder, by its URL."""
    binary = _find("nats_server")
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(str(binary), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await _wait_for_port(port)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def kafka_broker(folder: Path) -> AsyncIterator[str]:
    """A broker of one node in KRaft mode, by its address."""
    jars = _find("kafka_jars")
    await asyncio.to_thread(folder.mkdir)
    port, controller = free_port(), free_port()
    properties = KAFKA_PROPERTIES.format(port=port, controller=controller, folder=folder)
    (folder / "server.properties").write_text(properties)
    java = ("java", *JAVA, "-cp", f"{jars}/*")
    settings = str(folder / "server.properties")
    words = ("kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", settings)
    with (folder / "log").open("wb") as log:
        formatting = await asyncio.create_subprocess_exec(*java, *words, stdout=log, stderr=log)
        assert await formatting.wait() == 0, (folder / "log").read_text()
        process = await asyncio.create_subprocess_exec(
            *java, "kafka.Kafka", settings, stdout=log, stderr=log
        )
    try:
        await _wait_for_port(port)
        yield f"127.0.0.1:{port}"
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
