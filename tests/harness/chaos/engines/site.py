"""Everybody of a run with real engines: trainer, keeper, two engines, and who samples from them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from tests.harness.chaos import keeper, spawning
from tests.harness.chaos.engines import publisher
from tests.harness.chaos.engines.process import CutOffError, EngineProcess
from tests.harness.chaos.engines.sampling import AT_ONCE, Client
from tests.harness.chaos.journal import Journal
from tests.harness.chaos.publisher import retained
from tests.harness.chaos.settings import Settings
from tests.harness.chaos.spawning import Role

from etude.common.blobs import Store
from etude.common.weights import VersionId

PLACES = ("e0", "e1")
"""e0 is killed again and again; e1 starts late."""
LOOK_S = 0.1
START_S = 480.0
"""Twenty seconds on an idle core; a busy machine gets patience."""
ORDER_S = 60.0
GRACE_S = 10.0
HINT_S = 2.0
LOST, TWICE, LATE = 0.15, 0.15, 0.15
"""Chances of an announcement to be lost, to come twice, or after the next one."""


class StuckError(Exception):
    """The run does not go on."""


@dataclass(slots=True)
class Site:
    """The processes, and what was done to them; the oracle is in the journals."""

    settings: Settings
    raw: Store
    chance: random.Random = field(init=False)
    journal: Journal = field(init=False)
    engines: dict[str, EngineProcess] = field(init=False)
    clients: dict[str, Client] = field(init=False)
    injected: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    published: list[VersionId] = field(default_factory=list)
    late: list[tuple[str, VersionId]] = field(default_factory=list)
    """Announcements that come after the next one."""
    publishers: int = 0
    roles: dict[str, Role] = field(default_factory=dict)
    """The present trainer and keeper."""
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.settings.seed}/site")
        self.journal = self.settings.journal("site")
        self.engines = {place: EngineProcess(self.settings, place) for place in PLACES}
        self.clients = {
            place: Client(
                engine,
                self.settings.journal(f"client-{place}"),
                random.Random(f"{self.settings.seed}/{place}"),
            )
            for place, engine in self.engines.items()
        }

    @property
    def trainer(self) -> Role:
        """Who publishes now."""
        return self.roles["trainer"]

    @property
    def ready(self) -> list[EngineProcess]:
        """Engines that serve a version."""
        return [engine for engine in self.engines.values() if engine.live is not None]

    async def open(self) -> None:
        """Start everybody but the engine that comes late."""
        self.engines["e0"].start()
        await self.start_trainer(None, "start")
        sound = replace(self.settings, mutation="")
        self.roles["keeper"] = spawning.start(keeper.run, sound, "keeper-001")
        self.tasks.append(asyncio.create_task(self._look(), name="look"))
        for client in self.clients.values():
            client.may_go_on.set()
            self.tasks += [
                asyncio.create_task(client.sample(), name="sample") for _ in range(AT_ONCE)
            ]

    async def start_trainer(self, parent: VersionId | None, reason: str) -> None:
        """A new trainer goes on from a version's checkpoint."""
        self.publishers += 1
        who = f"trainer-{self.publishers:03d}"
        sound = replace(self.settings, mutation="")
        self.roles["trainer"] = spawning.start(publisher.run, sound, who, parent, reason)
        await self._answer()

    async def publish(self) -> VersionId:
        """One more version; nobody is told."""
        self.trainer.link.send("step")
        version: VersionId = await self._answer()
        self.published.append(version)
        return version

    async def step(self) -> VersionId:
        """One more version, announced as badly as announcements may be."""
        version = await self.publish()
        await self.announce(version)
        return version

    async def roll_back(self, below: int) -> VersionId:
        """A new epoch whose parent is an older checkpoint's version."""
        parent = [each for each in retained(self.settings) if each.number < below][-1]
        self.injected["roll-back"] += 1
        self.trainer.link.send(parent)
        await self._answer()
        return parent

    async def announce(self, version: VersionId) -> None:
        """Tell the engines: never, once, twice, or too late."""
        for place, old in self.late:
            await self._hint(place, old)
        self.late.clear()
        for place in PLACES:
            point = self.chance.random()
            if point < LOST:
                self.injected["lost announce"] += 1
                continue
            if point < LOST + LATE:
                self.injected["old announce"] += 1
                self.late.append((place, version))
                continue
            await self._hint(place, version)
            if point < LOST + LATE + TWICE:
                self.injected["double announce"] += 1
                await self._hint(place, version)

    async def _hint(self, place: str, version: VersionId) -> None:
        if self.engines[place].status is not None:
            try:
                await self.engines[place].call("AnnounceVersion", version)
            except (grpc.aio.AioRpcError, CutOffError) as error:
                self.journal.write("no hint", place=place, text=str(error)[:300])

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait until something holds; whether it did in time.

        Raises:
            StuckError: a process has ended that should run.
        """
        end = time.monotonic() + limit_s
        while not holds():
            self._check_alive()
            if time.monotonic() > end:
                return False
            await asyncio.sleep(LOOK_S / 2)
        return True

    async def until_home(self, limit_s: float, *, everybody: bool = False) -> bool:
        """Wait until all engines that serve, or that run, serve the newest version."""
        home = self.published[-1]

        def are_home() -> bool:
            started = [each for each in self.engines.values() if each.is_started]
            return all(each.live == home for each in (started if everybody else self.ready))

        return await self.until_heard(are_home, home, limit_s)

    async def until_heard(
        self, holds: Callable[[], bool], version: VersionId, limit_s: float
    ) -> bool:
        """Wait like until(), and tell engines of a version again and again.

        After an outage an engine looks ever more seldom by itself.
        """
        end = time.monotonic() + limit_s
        while not await self.until(holds, HINT_S):
            if time.monotonic() > end:
                return False
            for place in PLACES:
                await self._hint(place, version)
        return True

    def _check_alive(self) -> None:
        for engine in self.engines.values():
            if engine.exit_status is not None and engine.who not in engine.killed:
                raise StuckError(f"{engine.who} ended: {engine.last_words()}")
        for task in filter(asyncio.Task.done, self.tasks):
            raise StuckError(f"{task.get_name()} ended: {task}")
        for role in self.roles.values():
            if not role.is_alive and not role.killed:
                words = (self.settings.folder / f"{role.who}.err").read_text().splitlines()
                raise StuckError(f"{role.who} ended: {words[-20:]}")

    async def _answer(self) -> Any:
        if not await self.until(self.trainer.link.poll, ORDER_S):
            raise StuckError(f"{self.trainer.who} does not answer")
        return self.trainer.link.recv()

    async def _look(self) -> None:
        while True:
            for engine in self.engines.values():
                if engine.weights is not None and engine.exit_status is None:
                    await engine.look()
                    self._note(engine)
            link = self.roles["keeper"].link
            while not link.closed and link.poll():
                link.recv()
            await asyncio.sleep(LOOK_S)

    def _note(self, engine: EngineProcess) -> None:
        status = engine.status
        if engine.live is not None and status is not None:
            self.journal.write(
                "status",
                engine=engine.who,
                version=str(engine.live),
                state=status.state_digest.hex(),
                reason=status.reason,
            )

    async def close(self) -> list[str]:
        """Let everybody end in order; who did not."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        bad = []
        for engine in self.engines.values():
            if engine.is_started and engine.exit_status is None:
                self.settings.journal(engine.who).write("end", rss_kib=engine.peak_rss_kib())
                if (code := await engine.stop()) != 0:
                    bad.append(f"{engine.who} ended with status {code} when it was told to")
        for role in self.roles.values():
            if role.is_alive:
                role.link.send("end")
                role.process.join(GRACE_S)
            role.process.kill()
        return bad
