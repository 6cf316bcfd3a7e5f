"""A real NATS server, and relays as processes that are killed."""

import asyncio
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support import needs
from tests.support.feedback.process import FeedbackProcess, free_port

ROOT = Path(__file__).parents[3]
START_S = 30.0


@asynccontextmanager
async def nats_server(folder: Path) -> AsyncIterator[str]:
    """A server with JetStream on a folder, by its URL."""
    binary = _find_nats()
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


def _find_nats() -> Path:
    binary: Path = runpy.run_path(str(ROOT / "hack" / "event_servers.py"))["nats_server"]()
    if not binary.exists():
        needs.skip("there is no NATS server: `make event-servers` builds one", "event-servers")
    return binary


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
        await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode
