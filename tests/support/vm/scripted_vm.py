"""A machine that does what a test says, and refuses what no real one could do."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.suspend.auto_suspend import SuspendableVm
from etude.envserver.drivers.vm.suspend.idle_policy import PowerStep
from etude.envserver.guest.calls import GuestReply, GuestRequest
from etude.envserver.guest.channel import GuestLostError
from etude.v1 import guest_pb2

REPLY = GuestReply(guest_pb2.GuestResult(), {}, is_replayed=False, is_kept=True)


@dataclass(slots=True)
class ScriptedSleeper(SuspendableVm):
    """Each step takes a few turns of the event loop, as many as the dice say."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    fails: Callable[[PowerStep], bool] = lambda _: False
    on_jobs: Callable[[int], None] = lambda _: None
    generation: int = 0
    steps: list[PowerStep] = field(default_factory=list)
    clocks: list[bool] = field(default_factory=list)
    where: str = "running"
    is_busy: bool = False
    num_calls: int = 0
    is_ended: bool = False

    @override
    async def call(self, request: GuestRequest) -> GuestReply:
        self.num_calls += 1
        try:
            for _ in range(self.dice.randrange(3)):
                assert self.is_ended or (self.where == "running" and not self.is_busy)
                await asyncio.sleep(0)
        finally:
            self.num_calls -= 1
        if self.is_ended:
            raise GuestLostError("it has ended")
        return REPLY

    @override
    async def copy(self, path: Path, *, max_bytes: int) -> None:
        assert self.where == "running"

    @override
    async def record_use(self) -> None:
        assert self.where == "running"

    @override
    async def freeze(self) -> None:
        assert self.num_calls == 0
        await self._go(PowerStep.FREEZE, "running", "frozen")

    @override
    async def thaw(self, *, sets_clock: bool) -> None:
        self.clocks.append(sets_clock)
        await self._go(PowerStep.THAW, "frozen", "running")

    @override
    async def save(self) -> None:
        await self._go(PowerStep.SAVE, "frozen", "saved")

    @override
    async def restore(self) -> None:
        await self._go(PowerStep.RESTORE, "saved", "running")

    @override
    async def destroy(self) -> None:
        self.is_ended = True

    async def _go(self, step: PowerStep, origin: str, to: str) -> None:
        assert self.where == origin, (self.where, step)
        assert not self.is_busy
        assert not self.is_ended
        self.is_busy = True
        try:
            for _ in range(self.dice.randrange(4)):
                await asyncio.sleep(0)
            self.steps.append(step)
            if self.fails(step):
                raise VmmError(f"{step.value} fails")
            self.where = to
        finally:
            self.is_busy = False
