"""A pool that takes images of tasks, and calls that are measured from the launch on."""

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environment_bench.pool import Client, Pool
from tests.support.vm import gvisors
from typing_extensions import override

from etude.v1 import environments_pb2

SIBLINGS = 2
MIB = 1 << 20
_WORD = ("run_terminal", {"command": "cat /etc/word"})


@dataclass(slots=True, kw_only=True)
class ImagePool(Pool):
    """Its images come from one layout, and have a budget of the disk."""

    layout: Path
    disk_mib: int = field(default=40_960)

    @override
    def spec(self) -> dict[str, object]:
        images = {"sources": [self.layout.as_uri()], "diskMib": self.disk_mib}
        return {**Pool.spec(self), "images": images}

    def metric(self, name: str, outcome: str = "") -> float:
        """A figure of the node's own; 0 where it has none."""
        url = f"http://127.0.0.1:{self.ports['probe-node']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        wanted = f'{name}{{outcome="{outcome}"}}' if outcome else name
        found = [line.rpartition(" ")[2] for line in lines if line.split(" ")[0] == wanted]
        return float(found[0]) if found else 0.0

    def node_cpu_s(self) -> float:
        """CPU time of the node and its programs that have ended."""
        return self.cpu_ms() / 1000


@contextlib.asynccontextmanager
async def running(pool: ImagePool) -> AsyncIterator[Client]:
    """A pool that is ready, and a client."""
    try:
        await pool.start()
        async with pool.client() as client:
            yield client
    finally:
        pool.stop()
        await asyncio.to_thread(gvisors.end_all, pool.folder / "scratch")


async def first_call_s(
    client: Client, image: str, *, snapshot_id: str = ""
) -> tuple[float, environments_pb2.Lease]:
    """Seconds from a launch to the answer of its first call, and the lease.

    Raises:
        RuntimeError: the environment is of another image.
    """
    began_s = time.perf_counter()
    (lease,) = await client.launch(uri="empty:", image=image, snapshot_id=snapshot_id)
    await _call(client, lease)
    return time.perf_counter() - began_s, lease


async def run_group(client: Client, image: str, *, think_s: float) -> float:
    """Siblings of one task; returns the seconds until all have had their first answer."""
    began_s = time.perf_counter()
    leases: Sequence[environments_pb2.Lease] = await client.launch(
        SIBLINGS, uri="empty:", image=image
    )
    await asyncio.gather(*(_call(client, lease) for lease in leases))
    took_s = time.perf_counter() - began_s
    await asyncio.sleep(think_s)
    await client.release(leases)
    return took_s


async def _call(client: Client, lease: environments_pb2.Lease) -> None:
    (result,) = await client.turn(lease, _WORD)
    if b"image-" not in result.content:
        raise RuntimeError(f"an environment says {result.content!r}")
