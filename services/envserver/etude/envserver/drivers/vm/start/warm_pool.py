"""Warm pool of one template: paused clones and idle VMMs that wait for starts."""

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from etude.envserver import metrics
from etude.envserver.drivers.vm import guest_vm
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import Guest
from etude.envserver.drivers.vm.interface import Base, Monitor
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.start import warm_pool_levels
from etude.envserver.drivers.vm.start.cpu_budget import Work
from etude.envserver.drivers.vm.start.start_scheduler import Lanes
from etude.envserver.drivers.vm.start.warm_pool_levels import Backoff, Held, Step, Target, Watermark
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_numbers = itertools.count()


class _Due(NamedTuple):
    """Change that is due now, or the time to look again."""

    step: Step | None = None
    at_s: float | None = None


_NOTHING = _Due()


class Stock:
    """Keeps as many paused clones and idle VMMs as its target, made in spare time."""

    def __init__(self, base: Base, *, folder: Path, jail: Jail, lanes: Lanes) -> None:
        """Keep nothing until there is a target.

        Args:
            base: their template.
            folder: private; VMs in it serve no environment.
            jail: user and limits of the VMMs.
            lanes: the host's start scheduler.
        """
        self.trouble = ""
        """Error of the last refill; empty if it succeeded."""
        self._base, self._folder, self._jail, self._lanes = base, folder, jail, lanes
        self._target = Target()
        self._watermark = Watermark()
        self._backoff = Backoff()
        self._paused: deque[Guest] = deque()
        self._shells: deque[Monitor] = deque()
        self._counted = Held(paused=0, shells=0)
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        lanes.when_crowded(self._give_up_one)

    @property
    def held(self) -> Held:
        """Present content."""
        return Held(paused=len(self._paused), shells=len(self._shells))

    def set_target(self, target: Target) -> None:
        """Set the target from now on."""
        self._target = target
        self._watermark = self._watermark.rested(target, now_s=time.monotonic())
        self._nudge()

    def take_paused(self) -> Guest | None:
        """Take a paused clone, if there is one; it belongs to the caller."""
        while self._paused:
            found = self._living(self._paused.popleft())
            self._nudge()
            if isinstance(found, Guest):
                return found
        return None

    def take(self, *, only_shell: bool = False) -> Guest | Monitor | None:
        """Take the warmest VM; it belongs to the caller.

        Args:
            only_shell: whether another state than the template's will be restored.
        """
        found: Guest | Monitor | None = None
        while self._paused and not only_shell and found is None:
            found = self._living(self._paused.popleft())
        while self._shells and found is None:
            found = self._living(self._shells.popleft())
        # Starts of the template itself are spawned, or are the broker's to order ahead.
        self._watermark = self._watermark.taken(
            self._target, is_drained=only_shell and found is None, now_s=time.monotonic()
        )
        self._nudge()
        return found

    async def close(self) -> None:
        """End all VMs and stop refilling."""
        self._target = Target()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        while self._paused:
            self._end(self._paused.pop())
        while self._shells:
            self._end(self._shells.pop())
        if self._ending:
            await asyncio.wait(self._ending)
        self._count()

    def _nudge(self) -> None:
        self._count()
        self._changed.set()
        is_idle = self._keeper is None or self._keeper.done()
        if is_idle and self._due(time.monotonic()) != _NOTHING:
            name = f"stock of {self._base.address[:12]}"
            self._keeper = asyncio.create_task(self._keep(), name=name)

    async def _keep(self) -> None:
        """Move towards the target until nothing is left to do."""
        while True:
            self._changed.clear()
            now_s = time.monotonic()
            self._watermark = self._watermark.rested(self._target, now_s=now_s)
            due = self._due(now_s)
            if due.step is not None:
                await self._take(due.step)
            elif due.at_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(due.at_s - now_s, 0.0)):
                        await self._changed.wait()
            else:
                return

    def _due(self, now_s: float) -> "_Due":
        step = warm_pool_levels.step(self.held, self._target, self._watermark)
        at_s = self._watermark.next_s(self._target)
        is_more = step in {Step.MAKE_PAUSED, Step.MAKE_SHELL}
        if is_more and self._backoff.until_s > now_s:
            until_s = self._backoff.until_s
            return _Due(at_s=until_s if at_s is None else min(at_s, until_s))
        return _Due(step, at_s)

    async def _take(self, step: Step) -> None:
        match step:
            case Step.DROP_PAUSED:
                await asyncio.wait([self._end(self._paused.pop())])
            case Step.DROP_SHELL:
                await asyncio.wait([self._end(self._shells.pop())])
            case Step.MAKE_PAUSED | Step.MAKE_SHELL:
                try:
                    await self._make(step)
                except (VmmError, GuestLostError, OSError) as error:
                    self._failed(error)
                else:
                    self.trouble, self._backoff = "", Backoff()
        self._count()

    async def _make(self, step: Step) -> None:
        is_paused = step is Step.MAKE_PAUSED
        work = Work.RESTORE if is_paused else Work.SPAWN
        async with self._lanes.turn(work, is_urgent=False), self._new_folder() as folder:
            shell = await self._base.spawn(folder, self._jail)
            self._lanes.watch(shell)
            if is_paused:
                self._paused.append(await guest_vm.paused(shell, self._base))
            else:
                self._shells.append(shell)

    @contextlib.asynccontextmanager
    async def _new_folder(self) -> AsyncIterator[Path]:
        folder = self._folder / f"{self._base.address[:12]}-{next(_numbers)}"
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _give_up_one(self) -> None:
        """Free memory for a waiting start, one VM at a time: idle VMMs first, which are cheaper."""
        if not self._ending and (self._shells or self._paused):
            self._end(self._shells.pop() if self._shells else self._paused.pop())
            self._nudge()

    def _end(self, found: Guest | Monitor) -> "asyncio.Task[None]":
        """End a VM, also if the caller is cancelled meanwhile."""
        task = asyncio.create_task(found.destroy(), name="end a pooled VM")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def _failed(self, error: Exception) -> None:
        now_s = time.monotonic()
        self._backoff = self._backoff.failed(now_s=now_s)
        self.trouble = str(error)
        metrics.warm_start_failures.inc()
        wait_s = self._backoff.until_s - now_s
        log.warning("warm pool is not refilled for %g s: %s", wait_s, error)

    def _living(self, found: Guest | Monitor) -> Guest | Monitor | None:
        vm = found.vm if isinstance(found, Guest) else found
        if not vm.exited.done():
            return found
        self._end(found)
        return None

    def _count(self) -> None:
        held = self.held
        metrics.warm_vms.labels("paused_clone").inc(held.paused - self._counted.paused)
        metrics.warm_vms.labels("shell").inc(held.shells - self._counted.shells)
        self._counted = held
