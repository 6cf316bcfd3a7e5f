"""The feedback service as a process on a folder, to be killed."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tests.support.feedback.events import TERMS
from tests.support.free_ports import reserve_port

from etude.common import api_keys

STARTED_S = 60.0
RETRY_S = 0.1


@dataclass
class FeedbackProcess:
    """One service after the other on the same folder."""

    folder: Path
    port: int
    key: str
    """Of a server of tenant acme, which may export too."""
    process: asyncio.subprocess.Process | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""

    @classmethod
    def prepare(cls, folder: Path) -> "FeedbackProcess":
        """Write the files of the service."""
        key, line = api_keys.make_key("backend", "users,export")
        options = f"tenant=acme consent={TERMS} limit=10000000"
        (folder / "api-keys").write_text(f"{line} {options}\n")
        (folder / "secret").write_text(os.urandom(32).hex())
        return cls(folder, reserve_port(), key)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "ETUDE_FEEDBACK_STORE": (self.folder / "ledger").as_uri(),
            "ETUDE_FEEDBACK_KEY_STORE": (self.folder / "keys").as_uri(),
            "ETUDE_FEEDBACK_SECRET_FILE": str(self.folder / "secret"),
            "ETUDE_FEEDBACK_API_KEYS": str(self.folder / "api-keys"),
            "ETUDE_PORT": str(self.port),
            "ETUDE_PROBE_PORT": "0",
            **self.settings,
        }

    async def start(self) -> asyncio.subprocess.Process:
        """Start it, and wait until it answers."""
        command = (sys.executable, "-m", "etude.feedback.main")
        self.process = await asyncio.create_subprocess_exec(
            *command, env=self.env, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(STARTED_S), httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{self.url}/v1/schemas/shown")
                except httpx.TransportError:
                    assert self.process.returncode is None, "it ended as it started"
                    await asyncio.sleep(RETRY_S)
                else:
                    return self.process

    async def stop(self, number: signal.Signals) -> int:
        """Send a signal, and wait for the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return await self.process.wait()

    async def export(self, *, page: int = 1_000) -> list[str]:
        """Id of each event in the ledger, in its order."""
        found: list[str] = []
        after: int | None = 0
        async with httpx.AsyncClient(timeout=120, headers=self.headers) as client:
            while after is not None:
                query = {"after": after, "limit": page}
                answer = await client.get(f"{self.url}/v1/events", params=query)
                content = answer.raise_for_status().json()
                found += [each["event"]["id"] for each in content["events"]]
                after = content["next"]
        return found
