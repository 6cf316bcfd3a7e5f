"""Starting environments of one template, each from the warmest machine there is."""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.envserver import metrics
from etude.envserver.drivers.base import Start
from etude.envserver.drivers.machines import guests
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.guests import Guest
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.machines.lanes import Lanes
from etude.envserver.drivers.machines.pace import Work
from etude.envserver.drivers.machines.protocol import Base, Delta, Monitor
from etude.envserver.drivers.machines.stock import Stock
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_RECENT = 256


class Splitter(Protocol):
    """Splits machines off one that has run for a while, where a monitor can do that."""

    @property
    def is_ready(self) -> bool:
        """Whether a machine can be split off now."""
        ...

    async def split(self, folder: Path) -> Monitor | None:
        """A stopped machine in an empty folder of its own; None where none can be split off.

        The folder stays, and is empty, if there is none.

        Raises:
            VmmError: the folder is of no use any more.
        """
        ...

    async def distrust(self, error: Exception) -> None:
        """Split nothing off for a while: a machine that was split off did not answer."""
        ...


class Brancher(Protocol):
    """Splits off what takes up a saved state, for several that want the same one at once."""

    def of(self, saved: Delta) -> AbstractAsyncContextManager[Splitter | None]:
        """What machines of a state are split off from; None for who is alone with it."""
        ...


class Started(NamedTuple):
    """A guest that runs and answers, and how that came to be."""

    guest: Guest
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """One template, its warm pool, and the pace of the node."""

    base: Base
    jail: Jail
    lanes: Lanes
    stock: Stock
    stems: Splitter | None = None
    """What splits machines off, where that can be done."""
    branches: Brancher | None = None
    """The same for saved states."""
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """How long the newest starts took for which nothing was ready."""

    async def start(
        self, name: str, folder: Path, *, saved: Delta | None = None, generation: int = 1
    ) -> Started:
        """A clone that runs and answers.

        Args:
            name: its environment's id and host name.
            folder: an empty folder, which becomes the machine's.
            saved: the state that it takes up; unset is the template's.
            generation: above one it goes on as what it was, and keeps its names.

        Raises:
            GuestLostError: the agent does not answer.
            VmmError: the monitor failed.
        """
        async with self._splitter(saved) as stem:
            return await self._start(stem, name, folder, saved=saved, generation=generation)

    @asynccontextmanager
    async def _splitter(self, saved: Delta | None) -> AsyncIterator[Splitter | None]:
        if saved is None:
            yield self.stems
        elif self.branches is None:
            yield None
        else:
            async with self.branches.of(saved) as stem:
                yield stem

    async def _start(
        self,
        stem: Splitter | None,
        name: str,
        folder: Path,
        *,
        saved: Delta | None,
        generation: int,
    ) -> Started:
        began_s = time.monotonic()
        while True:
            found = self._found(stem, only_shell=saved is not None)
            begin = partial(
                self._begun, found, stem, folder, name=name, saved=saved, generation=generation
            )
            try:
                started = await self._from(found, begin)
            except (GuestLostError, VmmError) as error:
                if found is None:
                    raise
                log.warning("a machine of the warm pool was of no use: %s", error)
                _make(folder)
            else:
                metrics.starts.labels(started.start.value).inc()
                took_s = time.monotonic() - began_s
                metrics.start_seconds.labels(started.start.value).observe(took_s)
                return started

    def _found(self, stem: Splitter | None, *, only_shell: bool) -> Guest | Monitor | None:
        if stem is not None and stem.is_ready:
            # To split a machine off costs less than a shell does from here on.
            return None if only_shell else self.stock.take_paused()
        return self.stock.take(only_shell=only_shell)

    async def _from(
        self, found: Guest | Monitor | None, begin: Callable[[], Awaitable[Started]]
    ) -> Started:
        work, vm = _work(found), _vm(found)
        try:
            async with self.lanes.turn(work):
                before_s = 0.0 if vm is None else cpu_s(vm.pid)
                began_s = time.monotonic()
                started = await begin()
                if started.start in {Start.SPAWN, Start.SPLIT}:
                    # Without the time in line, which the node tells apart.
                    self.recent_ms.append(1000 * (time.monotonic() - began_s))
                used_s = cpu_s(started.guest.vm.pid) - before_s
        except BaseException:
            if found is not None:
                await found.destroy()
            raise
        self.lanes.costs.measured(work, 1000 * used_s)
        metrics.start_cpu_seconds.labels(started.start.value).observe(used_s)
        return started

    async def _begun(
        self,
        found: Guest | Monitor | None,
        stem: Splitter | None,
        folder: Path,
        *,
        name: str,
        saved: Delta | None,
        generation: int,
    ) -> Started:
        if isinstance(found, Guest):
            _move(found.vm, folder)
            return Started(await guests.handed_out(found, name=name), Start.PAUSED_CLONE)
        if found is None and stem is not None:
            guest = await _part(stem, folder, name=name, generation=generation)
            if guest is not None:
                return Started(guest, Start.SPLIT if saved is None else Start.DELTA)
        start = Start.SPAWN if found is None else Start.SHELL
        if found is None:
            found = await self.base.spawn(folder, self.jail)
            self.lanes.watch(found)
        else:
            _move(found, folder)
        guest = await guests.begun(found, self.base, name=name, saved=saved, generation=generation)
        return Started(guest, start if saved is None else Start.DELTA)


async def _part(stem: Splitter, folder: Path, *, name: str, generation: int) -> Guest | None:
    """A machine that was split off and answers; None, and an empty folder, where that fails."""
    part = await stem.split(folder)
    if part is None:
        return None
    try:
        return await guests.split_off(part, name=name, generation=generation)
    except (GuestLostError, VmmError) as error:
        # What it came from may be broken, and a machine of its own is only slower.
        await stem.distrust(error)
        _make(folder)
        return None


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, from its clock: clock_getcpuclockid(3).

    Raises:
        VmmError: it has ended.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError as cause:
        raise VmmError(f"machine {pid} has ended") from cause


def _work(found: Guest | Monitor | None) -> Work:
    match found:
        case Guest():
            return Work.PAUSED_CLONE
        case None:
            return Work.RESTORE
        case _:
            return Work.SHELL


def _vm(found: Guest | Monitor | None) -> Monitor | None:
    return found.vm if isinstance(found, Guest) else found


def _move(vm: Monitor, folder: Path) -> None:
    """Give a machine another folder, which is empty.

    Raises:
        VmmError: it cannot be moved.
    """
    try:
        vm.folder.rename(folder)
    except OSError as cause:
        raise VmmError(f"{vm.folder} cannot become {folder}: {cause}") from cause
    vm.folder = folder


def _make(folder: Path) -> None:
    """A machine that failed took its folder with it."""
    folder.mkdir(mode=0o700, exist_ok=True)
