"""A replica's process: the real receiver, a numpy engine, and a server that hashes what it has."""

import asyncio
import os
import resource
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.harness.chaos import layout, model, mutations
from tests.harness.chaos.engine import INJECTED, ChaosEngine, ChaosRanks
from tests.harness.chaos.journal import Journal
from tests.harness.chaos.settings import RUN, Settings
from tests.harness.chaos.stores import faulty
from typing_extensions import override

from etude.common.errors import EtudeError
from etude.common.weights import VersionId
from etude.inference.engine.interface import EngineInfo
from etude.inference.status import ReplicaStatus
from etude.inference.updates import updater
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

LOOK_S = 0.25
PASS_S = 0.1
"""Longest time between two forward passes; a new label has one at once."""
RENEW_S = 0.5
AUDIT_EVERY = 20
LATE_S = 3.0
MANY = 8
"""So many announced versions are not worth visiting one by one."""
FAILED = 4
"""Exit status of a replica whose engine cannot go on."""


@dataclass(slots=True)
class LateStager(Stager):
    """Reads what was planned first only after a collector has deleted something."""

    marker: Path = field(kw_only=True)
    _is_late: bool = True

    @override
    def stage_blocks(self, *args: Any, **kwargs: Any) -> Path:
        if self._is_late:
            self._is_late = False
            before, end = _text(self.marker), time.monotonic() + LATE_S
            while _text(self.marker) == before and time.monotonic() < end:
                time.sleep(0.01)
        return super(LateStager, self).stage_blocks(*args, **kwargs)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@dataclass(slots=True)
class Server:
    """Stands in for forward passes: under the step lock, all live bytes and the label."""

    engine: ChaosEngine
    journal: Journal
    wake: threading.Event = field(default_factory=threading.Event)
    last: tuple[str, str, str] = ("", "", "")
    passes: int = 0

    def serve(self) -> None:
        """Pass after pass, for ever."""
        while True:
            self.wake.wait(PASS_S)
            self.wake.clear()
            with self.engine.step:
                before = self.engine.label
                if before is None or self.engine.failed:
                    continue
                sha = self._hash()
                after = self.engine.label
            self.passes += 1
            seen = (str(before), str(after), sha)
            if seen != self.last:
                self.journal.write("pass", label=seen[0], after=seen[1], sha=sha)
                self.last = seen

    def _hash(self) -> str:
        ranks = self.engine.ranks
        try:
            return model.sha256(layout.assembled(ranks.folder, ranks.ranks))
        except layout.MixedRanksError as error:
            return f"ranks differ in {error}"


@dataclass(slots=True)
class Replica:
    """One incarnation."""

    receiver: VersionFollower
    engine: ChaosEngine
    server: Server
    journal: Journal
    link: Connection
    orders: "asyncio.Queue[VersionId | None]" = field(default_factory=asyncio.Queue)
    told: VersionId | None = None

    async def follow(self, first: VersionId | None) -> None:
        """Commit what is announced, and look for what is not."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        if first is not None:
            self.orders.put_nowait(first)
        while not self.engine.failed:
            version = await self._next()
            undone = self.engine.swap.num_undone
            try:
                if version is None:
                    await self.receiver.catch_up()
                else:
                    await self.receiver.activate(version)
            except EtudeError as error:
                self._refused(error, version)
            for _ in range(self.engine.swap.num_undone - undone):
                self.journal.write("seen", fault="rank fails in commit")
            self._tell()

    async def _next(self) -> VersionId | None:
        """What to move to: an announced version, or whatever is newest (None)."""
        try:
            version = await asyncio.wait_for(self.orders.get(), LOOK_S)
        except TimeoutError:
            return None
        while self.orders.qsize() > MANY:
            version = self.orders.get_nowait()
        live = self.engine.live
        if version is not None and live is not None and version.number <= live.number:
            self.journal.write("seen", fault="old announce")
        return version

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                order, what = self.link.recv()
            except (EOFError, OSError):
                os._exit(1)
            match order:
                case "announce":
                    loop.call_soon_threadsafe(self.orders.put_nowait, what)
                case "fail":
                    self.engine.ranks.armed += what
                case "hold":
                    self.engine.ranks.held.clear()
                case "release":
                    self.engine.ranks.held.set()
                case "end":
                    self._end()
                case _:
                    raise AssertionError(order)

    def _end(self) -> None:
        """Say the last word, after a last forward pass."""
        done = self.server.passes
        while self.server.passes <= done + 1:
            self.server.wake.set()
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.journal.write("end", passes=self.server.passes, rss_kib=rss)
        os._exit(0)

    def _refused(self, error: EtudeError, version: VersionId | None) -> None:
        text = str(error)[:300]
        self.journal.write("refused", reason=error.reason, text=text, version=str(version))
        if INJECTED in text:
            self.journal.write("seen", fault="rank fails in prepare")
        self.link.send(("refused", (error.reason, text)))

    def _tell(self) -> None:
        if self.engine.live != self.told:
            self.told = self.engine.live
            self.server.wake.set()
            self.link.send(("live", self.told))


def run(
    settings: Settings, who: str, link: Connection, ranks: int, first: VersionId | None
) -> None:
    """Follow the chain, until told to end or until the engine fails; then a new one must start."""
    mutations.apply(settings.mutation)
    updater.LEASE_RENEWAL_S = RENEW_S
    journal = settings.journal(who)
    journal.write("start", first=first)
    folder = settings.folder / "scratch" / who
    processes = ChaosRanks(folder / "words", ranks, journal)
    link.send(("ready", processes.pids))
    store = faulty(settings, who, journal)
    info = EngineInfo(model="m", vocab_size=2, max_model_len=2, max_concurrent=1)
    engine = ChaosEngine(info, processes, journal, store)
    receiver = VersionFollower(
        stager=Stager(store, RUN, folder)
        if first is None
        else LateStager(store, RUN, folder, marker=settings.collected),
        engine=engine,
        status=ReplicaStatus(replica=who.partition("-")[0]),
        audit_every=AUDIT_EVERY,
    )
    server = Server(engine, journal)
    threading.Thread(target=server.serve, daemon=True).start()
    asyncio.run(Replica(receiver, engine, server, journal, link).follow(first))
    if "could not be undone" in engine.failed:
        journal.write("seen", fault="rank fails in undo")
    journal.write("failed", why=engine.failed)
    os._exit(FAILED)  # threads may wait for what never comes
