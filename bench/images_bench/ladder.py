"""Time to the first tool call by how much of it was done before: cold, cached, forked."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environment_bench.pool import Client

from images_bench.pool import ImagePool, first_call_s, running


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Medians in seconds, of one driver."""

    driver: str
    images: int
    cold_s: float
    """Pull, conversion, and the boot where there is one."""
    pulled_s: float
    """The image was here, and nothing was made of it yet: of a driver that boots."""
    cached_s: float
    """A further lease: an unpacked root, or a template that is restored."""
    forked_s: float
    """A lease that begins with a sibling's snapshot."""
    image_bytes: float
    """Disk space of one image, with what the driver made of it."""
    cold_cpu_s: float


async def measure(pool: ImagePool, images: Sequence[str]) -> Ladder:
    """Lease each image three times, the last time as a fork."""
    async with running(pool) as client:
        before_s = pool.node_cpu_s()
        cold = [await _leased(client, image) for image in images]
        cpu_s = pool.node_cpu_s() - before_s
        cached, forked = list[float](), list[float]()
        for number, image in enumerate(images):
            seconds, parent = await first_call_s(client, image)
            cached.append(seconds)
            await client.snapshot(parent, f"moment-{number}")
            seconds, child = await first_call_s(client, image, snapshot_id=f"moment-{number}")
            forked.append(seconds)
            await client.release([parent, child])
        image_bytes = pool.metric("etude_env_image_bytes") / len(images)
        pulled_s = await _after_boots_are_lost(pool, client, images)
    return Ladder(
        driver=pool.driver,
        images=len(images),
        cold_s=statistics.median(cold),
        pulled_s=pulled_s,
        cached_s=statistics.median(cached),
        forked_s=statistics.median(forked),
        image_bytes=image_bytes,
        cold_cpu_s=cpu_s / len(images),
    )


async def _after_boots_are_lost(pool: ImagePool, client: Client, images: Sequence[str]) -> float:
    """Median on a node whose images are here, and whose templates or roots are not."""
    if pool.node is not None:
        pool.node.terminate()
        pool.node.wait(60)
    shutil.rmtree(_made(pool), ignore_errors=True)
    pool.node = pool.spawn("node")
    await pool.ready("node")
    found = [await _leased(client, image) for image in images]
    return statistics.median(found)


def _made(pool: ImagePool) -> Path:
    """What the driver made of its images."""
    return pool.folder / "scratch" / ("roots" if pool.driver == "GVisor" else "templates")


async def _leased(client: Client, image: str) -> float:
    seconds, lease = await first_call_s(client, image)
    await client.release([lease])
    return seconds
