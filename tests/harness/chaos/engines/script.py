"""What happens to a run with real engines, and when."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tests.harness.chaos.engines.comparing import Comparison
from tests.harness.chaos.engines.schedule import Event, events
from tests.harness.chaos.engines.site import LOOK_S, START_S, Site, StuckError
from tests.harness.chaos.publisher import retained

from etude.common import weights
from etude.common.errors import EtudeError
from etude.common.weights import VersionId

LAG = 3
PATIENCE_S = 3.0
"""How long the trainer waits for engines that are behind by more."""
PACE_S, STARTING_S, HELD_S = 0.25, 2.5, 10.0
"""From one version to the next; while an engine starts; while an event waits for one that does."""
OUTAGE_S = 3.0
HOME_S = 90.0


@dataclass(slots=True)
class Script:
    """Publishes, and does the events as soon as their victims are there."""

    site: Site
    quick: bool = False
    comparison: Comparison = field(init=False)
    late_ways: str = ""
    """By which kinds of payload the late engine came."""
    recovering: dict[str, str] = field(default_factory=dict)
    """Who is started again, and what had happened."""

    def __post_init__(self) -> None:
        self.comparison = Comparison(self.site.settings)

    async def run(self) -> None:
        """Publish all versions, then wait until both engines serve the last one.

        Raises:
            StuckError: the run does not go on.
        """
        site, versions = self.site, self.site.settings.versions
        await site.open()
        await site.publish()
        if not await site.until_home(START_S, everybody=True):
            raise StuckError("the first engine never served")
        waiting = events(versions, quick=self.quick)
        while len(site.published) < versions - 1 or waiting:
            await site.step()
            await self.pace(is_held=self.is_due(waiting))
            while self.is_due(waiting) and self.can(waiting[0].kind):
                await self.do(waiting.pop(0).kind)
            self.note_recovered()
        await self.come_home()

    def is_due(self, waiting: Sequence[Event]) -> bool:
        """Whether the next event should have come."""
        return bool(waiting) and waiting[0].at <= len(self.site.published)

    def can(self, kind: str) -> bool:
        """Whether the victim is there; else the chain goes on, and the event comes later."""
        started = [each for each in self.site.engines.values() if each.is_started]
        if kind in {"compare", "flip at rest", "roll-back"}:
            return all(each.live is not None for each in started)
        return not kind.startswith("kill ") or self.site.engines["e0"].live is not None

    async def do(self, kind: str) -> None:
        """One event."""
        deeds: dict[str, Callable[[], Awaitable[None]]] = {
            "late engine": self.start_late,
            "roll-back": self.roll_back,
            "store stopped": self.stop_store,
            "flip at rest": self.flip_at_rest,
            "kill publisher": self.kill_publisher,
            "compare": self.compare,
        }
        self.site.journal.write("event", what=kind, version=str(self.site.published[-1]))
        await deeds[kind]() if kind in deeds else await self.kill(kind)

    async def pace(self, *, is_held: bool) -> None:
        """Give the engines time to serve what was published, or to start."""
        site = self.site
        newest = site.published[-1].number
        engines = [engine for engine in site.engines.values() if engine.is_started]
        if any(engine.live is None for engine in engines):
            absent = [engine for engine in engines if engine.live is None]
            wait_s = HELD_S if is_held else STARTING_S
            await site.until_heard(
                lambda: any(each.live is not None for each in absent), site.published[-1], wait_s
            )
        else:
            await asyncio.sleep(PACE_S)
        await site.until(
            lambda: all(e.live is None or e.live.number >= newest - LAG for e in engines),
            PATIENCE_S,
        )

    async def kill(self, kind: str) -> None:
        """SIGKILL of e0 at some moment of a swap, and start it again."""
        site, engine = self.site, self.site.engines["e0"]
        tasks: list[asyncio.Task[None]] = []
        if "two versions" not in kind:
            await engine.insist("SetTarget", engine.live)
            version = await site.publish()
            if "stage" in kind:
                await engine.insist("StageVersion", version)
                await engine.look()
                staged = engine.status and VersionId.from_proto(engine.status.staged)
                site.seen["staged when killed"] += staged == version
            elif "during" in kind:
                tasks.append(asyncio.create_task(engine.call("CommitVersion", version)))
                await asyncio.sleep(site.chance.uniform(0, 0.03))
            else:
                await engine.insist("CommitVersion", version)
        site.injected[kind] += 1
        await engine.kill()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            site.journal.write("cut off", what=repr(failed)[:200])
        engine.start()
        self.recovering[engine.who] = kind

    async def start_late(self) -> None:
        """The second engine: most of what it would have followed is deleted by now."""
        engine = self.site.engines["e1"]
        engine.start()
        self.site.injected["late engine"] += 1
        self.recovering[engine.who] = "late engine"

    def note_recovered(self) -> None:
        """Whoever serves again something recent."""
        for engine in self.site.ready:
            live, newest = engine.live, self.site.published[-1]
            if live is None or live.number < newest.number - LAG:
                continue
            kind = self.recovering.pop(engine.who, None)
            if kind is not None:
                self.site.seen[kind] += 1
            if kind == "late engine":
                ways = [
                    line for line in engine.metrics().splitlines() if "weights_bytes_total{" in line
                ]
                kinds = {line.partition('kind="')[2].partition('"')[0] for line in ways}
                self.late_ways = ", ".join(sorted(kinds))

    async def roll_back(self) -> None:
        """Leave versions behind that were served; one engine is told, the other finds out."""
        site = self.site
        parent = await site.roll_back(site.published[-1].number - 2)
        await site.engines["e0"].insist("RollbackVersion", parent)
        site.seen["roll-back"] += await site.until(
            lambda: all(engine.live == parent for engine in site.ready), HOME_S
        )

    async def stop_store(self) -> None:
        """Nobody is answered for a while; engines go on with what they have."""
        site = self.site
        site.injected["store stopped"] += 1
        site.settings.down.touch()
        noticed = False
        end = time.monotonic() + OUTAGE_S
        while time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
            told = [e.status.reason for e in site.engines.values() if e.status is not None]
            noticed = noticed or "StorageUnavailable" in told
        site.settings.down.unlink()
        site.seen["store stopped"] += noticed

    async def flip_at_rest(self) -> None:
        """One bit of a version is wrong before anybody has read it: refused, and left behind."""
        site = self.site
        ready = site.ready
        for engine in ready:
            await engine.insist("SetTarget", engine.live)
        version = await site.publish()
        [item] = weights.read_manifest(site.raw, version).objects
        data = bytearray(site.raw.get(item.key))
        data[item.index_offset // 2] ^= 1 << site.chance.randrange(8)
        site.raw.put(item.key, bytes(data))
        site.injected["flip at rest"] += 1
        for engine in ready:
            await engine.insist("SetTarget", None)
        site.seen["flip at rest"] += await site.until_heard(
            lambda: all(e.status is not None and e.status.reason == "Corrupt" for e in ready),
            version,
            HOME_S,
        )
        await asyncio.to_thread(_quarantine, site, version)
        await site.roll_back(version.number)
        site.seen["roll-back"] += await site.until(
            lambda: all(engine.live != version for engine in ready), HOME_S
        )

    async def kill_publisher(self) -> None:
        """SIGKILL of the trainer in the middle of a step; another takes over."""
        site = self.site
        site.injected["kill publisher"] += 1
        site.trainer.link.send("step")
        await asyncio.sleep(site.chance.uniform(0, 0.05))
        site.trainer.killed = True
        site.trainer.process.kill()
        site.trainer.process.join()
        await site.start_trainer(retained(site.settings)[-1], "takeover")
        site.seen["kill publisher"] += 1

    async def compare(self) -> None:
        """Ask all engines the same while nothing else runs, and export what they serve.

        Raises:
            StuckError: an engine does not come to the newest version.
        """
        site = self.site
        version = site.published[-1]
        if not await site.until_home(HOME_S):
            raise StuckError(f"not all engines came to {version}")
        for client in site.clients.values():
            await client.pause()
        await self.comparison.ask(site.ready, version)
        for client in site.clients.values():
            client.may_go_on.set()

    async def come_home(self) -> None:
        """End all faults, and wait until every engine serves the last version."""
        site = self.site
        site.settings.calm.touch()
        await site.publish()
        if not await site.until_home(START_S, everybody=True):
            return  # told as unrecovered
        self.note_recovered()
        await self.compare()


def _quarantine(site: Site, version: VersionId) -> None:
    while True:
        try:
            weights.quarantine(site.raw, version, reason="damaged in the store")
        except EtudeError:
            time.sleep(0.1)
        else:
            return
