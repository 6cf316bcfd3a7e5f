"""The feedback ledger under load, with kill -9: acknowledged events are there once.

python bench/ledger.py [--seconds N] [--rate N] [--kill-every N]

Clients send batches to a real feedback service on a folder at a fixed rate. The service is killed
now and then, and started again; clients send again whatever was not acknowledged. In the end all
events are exported and compared with what was acknowledged. Latencies are those of requests that
did not run while the service was down or starting; how long that was is a figure of its own.
Exits with 1 if an event was lost or counted twice, or if a goal is missed.

Examples:
  make bench-ledger                     ten minutes, a kill every half minute
  python bench/ledger.py --seconds 30   a first look
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))  # the events are those of the tests

from tests.support import figures
from tests.support.feedback import events as examples
from tests.support.feedback.process import RETRY_S, FeedbackProcess

BATCH = 20
RATE_GOAL = 500
P99_GOAL_MS = 200


@dataclass
class Killer:
    """Kills the service and starts it again."""

    service: FeedbackProcess
    outages_s: list[tuple[float, float]] = field(default_factory=list)
    """Each from a kill until the service was ready again."""

    def is_touched(self, began_s: float, ended_s: float) -> bool:
        """Return true if a request ran during an outage."""
        return any(began_s < ready_s and ended_s > down_s for down_s, ready_s in self.outages_s)

    async def run(self, every_s: float, over: asyncio.Event) -> None:
        """Kill until the load is over; the service runs when this returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await over.wait()
                    return
            down_s = time.monotonic()
            await self.service.stop(signal.SIGKILL)
            await self.service.start()
            self.outages_s.append((down_s, time.monotonic()))


@dataclass
class Load:
    """What clients sent, and what they were told."""

    service: FeedbackProcess
    acknowledged: set[str] = field(default_factory=set)
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each request that was acknowledged the first time."""
    num_repeated: int = 0

    async def send(self, client: httpx.AsyncClient, number: int) -> None:
        """Send one batch until all of it is acknowledged."""
        ids = [f"b{number}-{position}" for position in range(BATCH)]
        user = f"u-{number % 5_000}"
        batch = [examples.event(id=name, user=user, text=f"text {name}") for name in ids]
        body = json.dumps(batch).encode()
        began_s = time.monotonic()
        if await self._post(client, body):
            self.spans_s.append((began_s, time.monotonic()))
        else:
            await self._repeat(client, body)
        self.acknowledged.update(ids)

    async def _repeat(self, client: httpx.AsyncClient, body: bytes) -> None:
        while True:
            self.num_repeated += 1
            await asyncio.sleep(RETRY_S)
            if await self._post(client, body):
                return

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bool:
        kind = {"content-type": "application/cloudevents-batch+json"}
        headers, url = self.service.headers | kind, f"{self.service.url}/v1/events"
        try:
            answer = await client.post(url, content=body, headers=headers)
        except httpx.TransportError:
            return False
        if answer.status_code != 200:
            return False
        statuses = {each["status"] for each in answer.json()["results"]}
        if statuses - {200, 202}:
            sys.exit(f"an event was refused: {answer.text[:500]}")
        return True


async def load_for(
    seconds: float, rate: float, kill_every_s: float, folder: Path
) -> dict[str, float]:
    """Run the whole, and return the figures."""
    service = FeedbackProcess.prepare(folder)
    await service.start()
    load, killer = Load(service), Killer(service)
    over = asyncio.Event()
    killing = asyncio.create_task(killer.run(kill_every_s, over), name="kills")
    began_s = time.monotonic()
    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
        number = 0
        while time.monotonic() < began_s + seconds:
            group.create_task(load.send(client, number), name=f"batch-{number}")
            number += 1
            await asyncio.sleep(max(0.0, began_s + number * BATCH / rate - time.monotonic()))
    spent_s = time.monotonic() - began_s
    over.set()
    await killing
    stored = Counter(await service.export())
    await service.stop(signal.SIGTERM)
    latencies = sorted(
        end_s - start_s for start_s, end_s in load.spans_s if not killer.is_touched(start_s, end_s)
    )
    outages = [ready_s - down_s for down_s, ready_s in killer.outages_s]
    return {
        "lost": len(load.acknowledged - stored.keys()),
        "twice": sum(count > 1 for count in stored.values()),
        "events": len(load.acknowledged),
        "events_per_s": round(len(load.acknowledged) / spent_s, 1),
        "ack_p50_ms": round(1_000 * latencies[len(latencies) // 2], 1),
        "ack_p99_ms": round(1_000 * latencies[int(len(latencies) * 0.99)], 1),
        "kills": len(outages),
        "longest_outage_s": round(max(outages, default=0.0), 2),
        "repeated": load.num_repeated,
        "seconds": round(spent_s, 1),
    }


def main() -> None:
    """Print the figures and write bench/out/ledger.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=float, default=600, help="events a second")
    parser.add_argument("--kill-every", type=float, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            load_for(options.seconds, options.rate, options.kill_every, Path(folder))
        )
    figures.record("ledger", **found)
    print(json.dumps(found, indent=2))
    if found["lost"] or found["twice"]:
        sys.exit("events were lost or counted twice")
    if found["events_per_s"] < RATE_GOAL or found["ack_p99_ms"] > P99_GOAL_MS:
        sys.exit(f"goals: {RATE_GOAL} events a second, p99 {P99_GOAL_MS} ms")


if __name__ == "__main__":
    main()
