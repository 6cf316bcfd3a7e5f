"""Starter of one template's VMs: each start takes the warmest VM there is."""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple, Protocol

from etude.envserver import metrics
from etude.envserver.drivers.base import Start, Warmth
from etude.envserver.drivers.vm import guest_vm
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import Guest
from etude.envserver.drivers.vm.interface import Base, Delta, Monitor
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.start.cpu_budget import Work
from etude.envserver.drivers.vm.start.start_scheduler import Lanes
from etude.envserver.drivers.vm.start.warm_pool import Stock
from etude.envserver.drivers.vm.start.warm_pool_levels import FEWEST, MOST, Target
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_RECENT = 256


class Splitter(Protocol):
    """Spawns child VMs of a VM that has run for a while, where a VMM can do that."""

    @property
    def is_ready(self) -> bool:
        """True if a child VM can be spawned now."""
        ...

    async def split(self, folder: Path) -> Monitor | None:
        """Spawn a frozen child VM in an empty folder; None if that is not possible.

        Without a child the folder stays, and is empty.

        Raises:
            VmmError: the folder cannot be used any more.
        """
        ...

    async def distrust(self, error: Exception) -> None:
        """Stop spawning for a while: a child VM did not answer."""
        ...


class Brancher(Protocol):
    """Spawns child VMs of a saved state, for several starts that want the same one together."""

    def of(self, saved: Delta) -> AbstractAsyncContextManager[Splitter | None]:
        """Select the spawner of a state; None for a start that is alone with it."""
        ...


class Started(NamedTuple):
    """A guest that runs and answers, and the kind of its start."""

    guest: Guest
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """One template, its warm pool, and the host's start scheduler."""

    base: Base
    jail: Jail
    lanes: Lanes
    stock: Stock
    stems: Splitter | None = None
    """Spawner of child VMs, where there is a fork server."""
    branches: Brancher | None = None
    """Spawner for saved states."""
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Durations of the latest starts that found nothing ready."""

    async def start(
        self, name: str, folder: Path, *, saved: Delta | None = None, generation: int = 1
    ) -> Started:
        """Start a clone that runs and answers.

        Args:
            name: its environment's id and host name.
            folder: an empty folder, which becomes the VM's.
            saved: the state to restore; None restores the template's.
            generation: above 1 it resumes and keeps its host name and machine id.

        Raises:
            GuestLostError: the agent does not answer.
            VmmError: the VMM failed.
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
                log.warning("VM of the warm pool is unusable: %s", error)
                _make(folder)
            else:
                metrics.starts.labels(started.start.value).inc()
                took_s = time.monotonic() - began_s
                metrics.start_seconds.labels(started.start.value).observe(took_s)
                return started

    def _found(self, stem: Splitter | None, *, only_shell: bool) -> Guest | Monitor | None:
        if stem is not None and stem.is_ready:
            # A child VM costs less than an idle VMM from here on.
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
                    # Without the time in the queue, which is reported separately.
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
            return Started(await guest_vm.handed_out(found, name=name), Start.PAUSED_CLONE)
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
        guest = await guest_vm.begun(
            found, self.base, name=name, saved=saved, generation=generation
        )
        return Started(guest, start if saved is None else Start.DELTA)


async def _part(stem: Splitter, folder: Path, *, name: str, generation: int) -> Guest | None:
    """Spawn a child VM that answers; None, and an empty folder, on failure."""
    part = await stem.split(folder)
    if part is None:
        return None
    try:
        return await guest_vm.split_off(part, name=name, generation=generation)
    except (GuestLostError, VmmError) as error:
        # Its parent may be broken, and a start without it is only slower.
        await stem.distrust(error)
        _make(folder)
        return None


def cpu_s(pid: int) -> float:
    """CPU time of a process, from its clock: clock_getcpuclockid(3).

    Raises:
        VmmError: it has ended.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError as cause:
        raise VmmError(f"VM {pid} has ended") from cause


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
    """Move a VM to another, empty folder.

    Raises:
        VmmError: it cannot be moved.
    """
    try:
        vm.folder.rename(folder)
    except OSError as cause:
        raise VmmError(f"{vm.folder} cannot become {folder}: {cause}") from cause
    vm.folder = folder


def _make(folder: Path) -> None:
    """Make the folder again: a VM that failed has removed it."""
    folder.mkdir(mode=0o700, exist_ok=True)


def warmth(template: str, starter: Starter, quarantined: str) -> Warmth:
    """Report the readiness of a template."""
    held, median_ms, slow_ms = starter.stock.held, 0.0, 0.0
    if len(starter.recent_ms) > 1:
        tenths = quantiles(starter.recent_ms, n=10)
        median_ms, slow_ms = tenths[4], tenths[8]
    return Warmth(
        template=template,
        paused_clones=held.paused,
        shells=held.shells,
        spawn_cpu_ms=starter.lanes.costs.of(Work.RESTORE),
        start_p50_ms=median_ms,
        start_p90_ms=slow_ms,
        quarantined=quarantined,
    )


def targets(
    starter_of: Callable[[str], Starter],
    templates: Iterable[str],
    wanted: Sequence[Warmth],
    max_shells: int,
) -> Iterator[tuple[Starter, Target]]:
    """Compute the target of each warm pool: the sum over its templates."""
    by_name = {each.template: each for each in wanted}
    sums: dict[int, tuple[Starter, int, int]] = {}
    for name in templates:
        starter = starter_of(name)
        each = by_name.get(name, Warmth(template=name))
        _, paused, shells = sums.get(id(starter), (starter, 0, 0))
        sums[id(starter)] = (starter, paused + each.paused_clones, shells + each.shells)
    for starter, paused, shells in sums.values():
        kept = min(shells, MOST)
        # A template that was rolled back once is again, and an idle VMM saves a third of that.
        yield (
            starter,
            Target(paused=paused, shells=kept, max_shells=max(kept, min(max_shells, FEWEST))),
        )
