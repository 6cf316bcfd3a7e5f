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
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.interface import Vmm, VmTemplate
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.start import warm_pool_levels
from etude.envserver.drivers.vm.start.cpu_budget import StartWork
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.warm_pool_levels import (
    RefillBackoff,
    WarmPoolLevel,
    WarmPoolStep,
    WarmPoolTarget,
    Watermark,
)
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_numbers = itertools.count()


class _Due(NamedTuple):
    """Change that is due now, or the time to look again."""

    step: WarmPoolStep | None = None
    at_s: float | None = None


_NOTHING = _Due()


class WarmPool:
    """Keeps as many paused clones and idle VMMs as its target, made in spare time."""

    def __init__(
        self, template: VmTemplate, *, folder: Path, jail: Jail, scheduler: StartScheduler
    ) -> None:
        self.refill_error = ""
        """Error of the last refill; empty if it succeeded."""
        self._template, self.folder, self._jail, self._scheduler = template, folder, jail, scheduler
        self._target = WarmPoolTarget()
        self._watermark = Watermark()
        self._backoff = RefillBackoff()
        self._paused: deque[GuestVm] = deque()
        self._shells: deque[Vmm] = deque()
        self._counted = WarmPoolLevel(paused=0, shells=0)
        self._changed = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        scheduler.on_crowded(self._evict_one)

    @property
    def level(self) -> WarmPoolLevel:
        return WarmPoolLevel(paused=len(self._paused), shells=len(self._shells))

    def set_target(self, target: WarmPoolTarget) -> None:
        self._target = target
        self._watermark = self._watermark.after_rest(target, now_s=time.monotonic())
        self._nudge()

    def take_paused(self) -> GuestVm | None:
        """Take a paused clone, if there is one; it belongs to the caller."""
        while self._paused:
            found = self._if_alive(self._paused.popleft())
            self._nudge()
            if isinstance(found, GuestVm):
                return found
        return None

    def take(self, *, only_shell: bool = False) -> GuestVm | Vmm | None:
        """Take the warmest VM; it belongs to the caller.

        Args:
            only_shell: whether another state than the template's will be restored.
        """
        found: GuestVm | Vmm | None = None
        while self._paused and not only_shell and found is None:
            found = self._if_alive(self._paused.popleft())
        while self._shells and found is None:
            found = self._if_alive(self._shells.popleft())
        # Starts of the template itself are spawned, or are the broker's to order ahead.
        self._watermark = self._watermark.after_take(
            self._target, is_drained=only_shell and found is None, now_s=time.monotonic()
        )
        self._nudge()
        return found

    async def close(self) -> None:
        self._target = WarmPoolTarget()
        if self._refiller is not None:
            self._refiller.cancel()
            await asyncio.wait([self._refiller])
        while self._paused:
            self._end(self._paused.pop())
        while self._shells:
            self._end(self._shells.pop())
        if self._ending:
            await asyncio.wait(self._ending)
        self._update_metrics()

    def _nudge(self) -> None:
        self._update_metrics()
        self._changed.set()
        is_idle = self._refiller is None or self._refiller.done()
        if is_idle and self._due(time.monotonic()) != _NOTHING:
            name = f"stock of {self._template.address[:12]}"
            self._refiller = asyncio.create_task(self._refill(), name=name)

    async def _refill(self) -> None:
        """Move towards the target until nothing is left to do."""
        while True:
            self._changed.clear()
            now_s = time.monotonic()
            self._watermark = self._watermark.after_rest(self._target, now_s=now_s)
            due = self._due(now_s)
            if due.step is not None:
                await self._perform(due.step)
            elif due.at_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(due.at_s - now_s, 0.0)):
                        await self._changed.wait()
            else:
                return

    def _due(self, now_s: float) -> "_Due":
        step = warm_pool_levels.next_step(self.level, self._target, self._watermark)
        at_s = self._watermark.next_s(self._target)
        is_more = step in {WarmPoolStep.MAKE_PAUSED, WarmPoolStep.MAKE_SHELL}
        if is_more and self._backoff.until_s > now_s:
            until_s = self._backoff.until_s
            return _Due(at_s=until_s if at_s is None else min(at_s, until_s))
        return _Due(step, at_s)

    async def _perform(self, step: WarmPoolStep) -> None:
        match step:
            case WarmPoolStep.DROP_PAUSED:
                await asyncio.wait([self._end(self._paused.pop())])
            case WarmPoolStep.DROP_SHELL:
                await asyncio.wait([self._end(self._shells.pop())])
            case WarmPoolStep.MAKE_PAUSED | WarmPoolStep.MAKE_SHELL:
                try:
                    await self._make(step)
                except (VmmError, GuestLostError, OSError) as error:
                    self._failed(error)
                else:
                    self.refill_error, self._backoff = "", RefillBackoff()
        self._update_metrics()

    async def _make(self, step: WarmPoolStep) -> None:
        is_paused = step is WarmPoolStep.MAKE_PAUSED
        work = StartWork.RESTORE if is_paused else StartWork.SPAWN
        async with (
            self._scheduler.acquire_start(work, is_urgent=False),
            self._new_folder() as folder,
        ):
            shell = await self._template.spawn(folder, self._jail)
            self._scheduler.watch(shell)
            if is_paused:
                self._paused.append(await guest_vm.start_paused_clone(shell, self._template))
            else:
                self._shells.append(shell)

    @contextlib.asynccontextmanager
    async def _new_folder(self) -> AsyncIterator[Path]:
        folder = self.folder / f"{self._template.address[:12]}-{next(_numbers)}"
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _evict_one(self) -> None:
        """Free memory for a waiting start, one VM at a time: idle VMMs first, which are cheaper."""
        if not self._ending and (self._shells or self._paused):
            self._end(self._shells.pop() if self._shells else self._paused.pop())
            self._nudge()

    def _end(self, found: GuestVm | Vmm) -> "asyncio.Task[None]":
        """End a VM, also if the caller is cancelled meanwhile."""
        task = asyncio.create_task(found.destroy(), name="end a pooled VM")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def _failed(self, error: Exception) -> None:
        now_s = time.monotonic()
        self._backoff = self._backoff.failed(now_s=now_s)
        self.refill_error = str(error)
        metrics.warm_start_failures.inc()
        wait_s = self._backoff.until_s - now_s
        log.warning("warm pool is not refilled for %g s: %s", wait_s, error)

    def _if_alive(self, found: GuestVm | Vmm) -> GuestVm | Vmm | None:
        vm = found.vm if isinstance(found, GuestVm) else found
        if not vm.exited.done():
            return found
        self._end(found)
        return None

    def _update_metrics(self) -> None:
        held = self.level
        metrics.warm_vms.labels("paused_clone").inc(held.paused - self._counted.paused)
        metrics.warm_vms.labels("shell").inc(held.shells - self._counted.shells)
        self._counted = held
