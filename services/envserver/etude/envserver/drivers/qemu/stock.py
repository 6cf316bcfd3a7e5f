"""Machines of one template that wait for whoever needs one."""

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from etude.envserver import metrics
from etude.envserver.drivers.qemu import clone, guests, levels
from etude.envserver.drivers.qemu.errors import VmmError
from etude.envserver.drivers.qemu.guests import Guest
from etude.envserver.drivers.qemu.jail import Jail
from etude.envserver.drivers.qemu.lanes import Lanes
from etude.envserver.drivers.qemu.levels import Backoff, Held, Step, Target, Watermark
from etude.envserver.drivers.qemu.pace import Work
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.drivers.qemu.vm import Vm
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)


class Stock:
    """Keeps as many paused clones and shells as its target says, made while nobody waits."""

    def __init__(self, base: Template, *, folder: Path, jail: Jail, lanes: Lanes) -> None:
        """Nothing is kept until there is a target.

        Args:
            base: what they are clones of.
            folder: nobody else's; a machine in it has no environment.
            jail: whom the monitors run as.
            lanes: the pace of the node.
        """
        self.trouble = ""
        """Why it could not be filled when it was tried last; empty when it could."""
        self._base, self._folder, self._jail, self._lanes = base, folder, jail, lanes
        self._target = Target()
        self._watermark = Watermark()
        self._backoff = Backoff()
        self._paused: deque[Guest] = deque()
        self._shells: deque[Vm] = deque()
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Task[None] | None = None
        lanes.when_crowded(self._give_up_one)

    @property
    def held(self) -> Held:
        """What is there."""
        return Held(paused=len(self._paused), shells=len(self._shells))

    def set_target(self, target: Target) -> None:
        """Say how much is wanted from now on."""
        self._target = target
        self._watermark = self._watermark.rested(target, now_s=time.monotonic())
        self._nudge()

    def take(self, *, only_shell: bool = False) -> Guest | Vm | None:
        """The warmest machine there is; it is the caller's from now on.

        Args:
            only_shell: whether it is to take up another state than the template's.
        """
        found: Guest | Vm | None = None
        while self._paused and not only_shell and found is None:
            found = _living(self._paused.popleft())
        while self._shells and found is None:
            found = _living(self._shells.popleft())
        self._watermark = self._watermark.taken(
            self._target, is_drained=found is None, now_s=time.monotonic()
        )
        self._nudge()
        return found

    async def close(self) -> None:
        """End all that is kept; nothing is made any more."""
        self._target = Target()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._giving_up is not None:
            await asyncio.wait([self._giving_up])
        while self._paused:
            await self._paused.popleft().destroy()
        while self._shells:
            await self._shells.popleft().destroy()
        self._count()

    def _nudge(self) -> None:
        self._count()
        self._changed.set()
        if self._keeper is None or self._keeper.done():
            name = f"stock of {self._base.address[:12]}"
            self._keeper = asyncio.create_task(self._keep(), name=name)

    async def _keep(self) -> None:
        """Go towards the target, and end when nothing is left to do until somebody asks."""
        while True:
            self._changed.clear()
            now_s = time.monotonic()
            self._watermark = self._watermark.rested(self._target, now_s=now_s)
            step = levels.step(self.held, self._target, self._watermark)
            until_s = self._watermark.next_s(self._target)
            if step in {Step.MAKE_PAUSED, Step.MAKE_SHELL} and self._backoff.until_s > now_s:
                until_s, step = min(until_s or self._backoff.until_s, self._backoff.until_s), None
            if step is not None:
                await self._take(step)
            elif until_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(until_s - now_s, 0.0)):
                        await self._changed.wait()
            else:
                return

    async def _take(self, step: Step) -> None:
        match step:
            case Step.DROP_PAUSED:
                await self._paused.pop().destroy()
            case Step.DROP_SHELL:
                await self._shells.pop().destroy()
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
            shell = await clone.spawn_shell(self._base, folder=folder, jail=self._jail)
            self._lanes.watch(shell)
            if is_paused:
                self._paused.append(await guests.paused(shell, self._base))
            else:
                self._shells.append(shell)

    @contextlib.asynccontextmanager
    async def _new_folder(self) -> AsyncIterator[Path]:
        folder = self._folder / str(next(self._numbers))
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _give_up_one(self) -> None:
        """Make room for who waits, one at a time: shells first, which are cheaper to make again."""
        is_busy = self._giving_up is not None and not self._giving_up.done()
        if is_busy or not (self._shells or self._paused):
            return
        found = self._shells.pop() if self._shells else self._paused.pop()
        self._giving_up = asyncio.create_task(found.destroy(), name="make room")
        self._nudge()

    def _failed(self, error: Exception) -> None:
        now_s = time.monotonic()
        self._backoff = self._backoff.failed(now_s=now_s)
        self.trouble = str(error)
        metrics.stock_failures.inc()
        wait_s = self._backoff.until_s - now_s
        log.warning("the warm pool is not filled for %g s: %s", wait_s, error)

    def _count(self) -> None:
        metrics.stock.labels("paused_clone").set(len(self._paused))
        metrics.stock.labels("shell").set(len(self._shells))


def _living(found: Guest | Vm) -> Guest | Vm | None:
    vm = found.vm if isinstance(found, Guest) else found
    return None if vm.exited.done() else found
