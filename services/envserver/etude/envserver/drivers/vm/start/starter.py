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
from etude.envserver.drivers.base import StartKind, TemplateReadiness
from etude.envserver.drivers.vm import guest_vm
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.interface import VmDelta, Vmm, VmTemplate
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.start.cpu_budget import StartWork
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.warm_pool import WarmPool
from etude.envserver.drivers.vm.start.warm_pool_levels import FEWEST, MOST, WarmPoolTarget
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_RECENT = 256


class ChildSpawner(Protocol):
    """Spawns child VMs of a VM that has run for a while, where a VMM can do that."""

    @property
    def is_ready(self) -> bool:
        """True if a child VM can be spawned now."""

    async def spawn(self, folder: Path) -> Vmm | None:
        """Spawn a frozen child VM in an empty folder; None if that is not possible.

        Without a child the folder stays, and is empty.

        Raises:
            VmmError: the folder cannot be used any more.
        """

    async def suspend_spawning(self, error: Exception) -> None:
        """Stop spawning for a while: a child VM did not answer."""


class SnapshotSpawners(Protocol):
    """Spawns child VMs of a saved state, for several starts that want the same one together."""

    def spawner_of(self, saved: VmDelta) -> AbstractAsyncContextManager[ChildSpawner | None]:
        """Select the spawner of a state; None for a start that is alone with it."""


class StartedVm(NamedTuple):
    """A guest that runs and answers, and the kind of its start."""

    guest: GuestVm
    kind: StartKind


@dataclass(frozen=True, slots=True, kw_only=True)
class VmStarter:
    """One template, its warm pool, and the host's start scheduler."""

    template: VmTemplate
    jail: Jail
    scheduler: StartScheduler
    warm_pool: WarmPool
    spawner: ChildSpawner | None = None
    """Spawner of child VMs, where there is a fork server."""
    snapshot_spawners: SnapshotSpawners | None = None
    """Spawner for saved states."""
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Durations of the latest starts that found nothing ready."""

    async def start(
        self, name: str, folder: Path, *, saved: VmDelta | None = None, generation: int = 1
    ) -> StartedVm:
        """Start a clone that runs and answers."""
        async with self._spawner(saved) as stem:
            return await self._start(stem, name, folder, saved=saved, generation=generation)

    def readiness(self, name: str, quarantined: str) -> TemplateReadiness:
        level, median_ms, slow_ms = self.warm_pool.level, 0.0, 0.0
        if len(self.recent_ms) > 1:
            tenths = quantiles(self.recent_ms, n=10)
            median_ms, slow_ms = tenths[4], tenths[8]
        return TemplateReadiness(
            template=name,
            paused_clones=level.paused,
            shells=level.shells,
            spawn_cpu_ms=self.scheduler.costs.estimate_ms(StartWork.RESTORE),
            start_p50_ms=median_ms,
            start_p90_ms=slow_ms,
            quarantined=quarantined,
        )

    @asynccontextmanager
    async def _spawner(self, saved: VmDelta | None) -> AsyncIterator[ChildSpawner | None]:
        if saved is None:
            yield self.spawner
        elif self.snapshot_spawners is None:
            yield None
        else:
            async with self.snapshot_spawners.spawner_of(saved) as stem:
                yield stem

    async def _start(
        self,
        stem: ChildSpawner | None,
        name: str,
        folder: Path,
        *,
        saved: VmDelta | None,
        generation: int,
    ) -> StartedVm:
        began_s = time.monotonic()
        while True:
            found = self._take_warm(stem, only_shell=saved is not None)
            begin = partial(
                self._begin, found, stem, folder, name=name, saved=saved, generation=generation
            )
            try:
                started = await self._measure_start(found, begin)
            except (GuestLostError, VmmError) as error:
                if found is None:
                    raise
                log.warning("VM of the warm pool is unusable: %s", error)
                _remake_folder(folder)
            else:
                metrics.starts.labels(started.kind.value).inc()
                took_s = time.monotonic() - began_s
                metrics.start_seconds.labels(started.kind.value).observe(took_s)
                return started

    def _take_warm(self, stem: ChildSpawner | None, *, only_shell: bool) -> GuestVm | Vmm | None:
        if stem is not None and stem.is_ready:
            # A child VM costs less than an idle VMM from here on.
            return None if only_shell else self.warm_pool.take_paused()
        return self.warm_pool.take(only_shell=only_shell)

    async def _measure_start(
        self, found: GuestVm | Vmm | None, begin: Callable[[], Awaitable[StartedVm]]
    ) -> StartedVm:
        work, vm = _work_of(found), _vmm_of(found)
        try:
            async with self.scheduler.acquire_start(work):
                before_s = 0.0 if vm is None else cpu_s(vm.pid)
                began_s = time.monotonic()
                started = await begin()
                if started.kind in {StartKind.SPAWN, StartKind.SPLIT}:
                    # Without the time in the queue, which is reported separately.
                    self.recent_ms.append(1000 * (time.monotonic() - began_s))
                used_s = cpu_s(started.guest.vm.pid) - before_s
        except BaseException:
            if found is not None:
                await found.destroy()
            raise
        self.scheduler.costs.add_measurement(work, 1000 * used_s)
        metrics.start_cpu_seconds.labels(started.kind.value).observe(used_s)
        return started

    async def _begin(
        self,
        found: GuestVm | Vmm | None,
        stem: ChildSpawner | None,
        folder: Path,
        *,
        name: str,
        saved: VmDelta | None,
        generation: int,
    ) -> StartedVm:
        if isinstance(found, GuestVm):
            _move_vm(found.vm, folder)
            return StartedVm(
                await guest_vm.resume_paused_clone(found, name=name), StartKind.PAUSED_CLONE
            )
        if found is None and stem is not None:
            guest = await _start_child(stem, folder, name=name, generation=generation)
            if guest is not None:
                return StartedVm(guest, StartKind.SPLIT if saved is None else StartKind.DELTA)
        start = StartKind.SPAWN if found is None else StartKind.SHELL
        if found is None:
            found = await self.template.spawn(folder, self.jail)
            self.scheduler.watch(found)
        else:
            _move_vm(found, folder)
        guest = await guest_vm.start_clone(
            found, self.template, name=name, saved=saved, generation=generation
        )
        return StartedVm(guest, start if saved is None else StartKind.DELTA)


async def _start_child(
    stem: ChildSpawner, folder: Path, *, name: str, generation: int
) -> GuestVm | None:
    """Spawn a child VM that answers; None, and an empty folder, on failure."""
    part = await stem.spawn(folder)
    if part is None:
        return None
    try:
        return await guest_vm.start_child(part, name=name, generation=generation)
    except (GuestLostError, VmmError) as error:
        # Its parent may be broken, and a start without it is only slower.
        await stem.suspend_spawning(error)
        _remake_folder(folder)
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


def _work_of(found: GuestVm | Vmm | None) -> StartWork:
    match found:
        case GuestVm():
            return StartWork.PAUSED_CLONE
        case None:
            return StartWork.RESTORE
        case _:
            return StartWork.SHELL


def _vmm_of(found: GuestVm | Vmm | None) -> Vmm | None:
    return found.vm if isinstance(found, GuestVm) else found


def _move_vm(vm: Vmm, folder: Path) -> None:
    """Move a VM to another, empty folder.

    Raises:
        VmmError: it cannot be moved.
    """
    try:
        vm.folder.rename(folder)
    except OSError as cause:
        raise VmmError(f"{vm.folder} cannot become {folder}: {cause}") from cause
    vm.folder = folder


def _remake_folder(folder: Path) -> None:
    """Make the folder again: a VM that failed has removed it."""
    folder.mkdir(mode=0o700, exist_ok=True)


def pool_targets(
    starter_of: Callable[[str], VmStarter],
    templates: Iterable[str],
    wanted: Sequence[TemplateReadiness],
    max_shells: int,
) -> Iterator[tuple[VmStarter, WarmPoolTarget]]:
    """Compute the target of each warm pool: the sum over its templates."""
    by_name = {each.template: each for each in wanted}
    sums: dict[int, tuple[VmStarter, int, int]] = {}
    for name in templates:
        starter = starter_of(name)
        each = by_name.get(name, TemplateReadiness(template=name))
        _, paused, shells = sums.get(id(starter), (starter, 0, 0))
        sums[id(starter)] = (starter, paused + each.paused_clones, shells + each.shells)
    for starter, paused, shells in sums.values():
        kept = min(shells, MOST)
        # A template that was rolled back once is again, and an idle VMM saves a third of that.
        yield (
            starter,
            WarmPoolTarget(
                paused=paused, shells=kept, max_shells=max(kept, min(max_shells, FEWEST))
            ),
        )
