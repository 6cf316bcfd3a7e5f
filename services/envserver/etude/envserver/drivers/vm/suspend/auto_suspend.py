"""Automatic suspend and resume: an idle VM is frozen, then suspended to disk; calls resume it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from etude.common.errors import CorruptError, UnavailableError
from etude.envserver import metrics
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.start.start_scheduler import RunSlots
from etude.envserver.drivers.vm.suspend.idle_policy import (
    Idleness,
    IdleTimeouts,
    PowerState,
    PowerStep,
)
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_NO_TIMEOUTS = IdleTimeouts(linger_s=0.0, job_s=0.0, frozen_s=0.0)


class SuspendableVm(GuestCaller, Protocol):
    """A VM that can be frozen and suspended between calls. Steps raise UnavailableError."""

    on_jobs: Callable[[int], None]
    """Callback with the number of its background commands, at each change."""
    generation: int
    """Number of times it was restored."""

    async def copy(self, path: Path, *, max_bytes: int) -> None:
        """Save it to a file while it runs; it continues.

        Raises:
            TooLargeError: the file would be larger.
        """

    async def record_use(self) -> None:
        """Let a successor of this process adopt it from here on."""

    @property
    def is_lost(self) -> bool:
        """True if it ended unexpectedly, or no longer answers."""
        return False

    async def freeze(self) -> None:
        """Freeze it: it uses no CPU time."""

    async def thaw(self, *, sets_clock: bool) -> None:
        """Resume it from a freeze."""

    async def save(self) -> None:
        """Suspend a frozen one to disk and free its memory; on error it stays in memory."""

    async def restore(self) -> None:
        """Restore it from disk, running; after an error it is still on disk."""

    def close_egress(self) -> None:
        """Close its egress; safe to repeat."""
        return

    async def destroy(self) -> None:
        """End it in any state, also in the middle of a step."""


class AutoSuspendingVm(GuestCaller):
    """Freezes an idle VM, suspends it to disk later, and resumes it for calls."""

    def __init__(
        self,
        vm: SuspendableVm,
        run_slots: RunSlots,
        *,
        state: PowerState = PowerState.RUNNING,
        timeouts: IdleTimeouts | None = None,
    ) -> None:
        """Start watching a VM.

        Args:
            vm: the VM.
            run_slots: slots for running VMs; a running VM holds one already.
            state: its present state: running, frozen or saved.
            timeouts: idle timeouts.
        """
        self.vm = vm
        vm.on_jobs = self._count_jobs
        self._run_slots, self._timeouts = run_slots, timeouts or IdleTimeouts()
        now_s = time.monotonic()
        self._idleness = Idleness(state=state, last_call_s=now_s, frozen_s=now_s, stopped_s=now_s)
        self._has_slot = state is PowerState.RUNNING
        self._hurries = False
        self._step: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future[str] | None = None
        self._why = ""
        self._act()

    @property
    def state(self) -> PowerState:
        return self._idleness.state

    @property
    def has_jobs(self) -> bool:
        return self._idleness.num_jobs > 0

    @property
    def is_lost(self) -> bool:
        in_memory = {PowerState.RUNNING, PowerState.FREEZING, PowerState.FROZEN, PowerState.THAWING}
        state = self._idleness.state
        return state is PowerState.ENDED or (state in in_memory and self.vm.is_lost)

    @override
    async def call(self, request: GuestRequest) -> GuestReply:
        async with self.keep_running():
            return await self.vm.call(request)

    @contextlib.asynccontextmanager
    async def keep_running(self) -> AsyncIterator[None]:
        """Keep it running during the block.

        Raises:
            GuestLostError: it has ended, or could not be resumed.
        """
        self._idleness, self._hurries = self._idleness.begin_call(), False
        try:
            while self._idleness.state is not PowerState.RUNNING:
                await self._next_change()
            yield
        finally:
            self._idleness = self._idleness.end_call(now_s=time.monotonic())
            if self._idleness.num_calls == 0:
                self._act()

    async def suspend(self) -> None:
        """Suspend it to disk now. Nothing calls it meanwhile.

        Raises:
            VmmError: it could not be suspended.
        """
        self._hurries = True
        self._act()
        while self._step is not None:
            await asyncio.wait([self._step])
        self._hurries = False
        if self._idleness.state is not PowerState.SAVED:
            raise VmmError(self._why or "the VM was called while it was being suspended")

    async def destroy(self) -> None:
        self._idleness = replace(self._idleness, state=PowerState.ENDED)
        self._why = self._why or "the VM of this lease has ended"
        if self._step is not None:
            self._step.cancel()
            await asyncio.wait([self._step])
            self._step = None
        self._wake_waiters(self._why)
        await self.vm.destroy()

    async def _next_change(self) -> None:
        """Wait for a change of state.

        Raises:
            GuestLostError: it could not be resumed.
        """
        if self._idleness.state is PowerState.ENDED:
            raise GuestLostError(self._why)
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        changed = self._changed
        self._act()
        # Shielded: other calls wait for the same change.
        why = await asyncio.shield(changed)
        if why:
            raise GuestLostError(why)

    def _act(self) -> None:
        """Start the step that is due, or a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._step is not None:
            return
        patience = _NO_TIMEOUTS if self._hurries else self._timeouts
        due = self._idleness.next_step(patience, now_s=time.monotonic())
        if due.step is not None:
            self._idleness = self._idleness.begin_step(due.step)
            self._step = asyncio.create_task(self._take(due.step), name=f"{due.step.value} a guest")
        elif due.again_s is not None:
            self._timer = asyncio.get_running_loop().call_later(due.again_s, self._act)

    async def _take(self, step: PowerStep) -> None:
        try:
            await self._perform(step)
        except (UnavailableError, CorruptError, OSError) as error:
            self._idleness = self._idleness.fail_step(step, now_s=time.monotonic())
            self._failed(step, error)
        else:
            self._idleness = self._idleness.complete_step(step, now_s=time.monotonic())
            metrics.suspensions.labels(step.value).inc()
            self._step = None
            self._wake_waiters("")
            self._act()

    async def _perform(self, step: PowerStep) -> None:
        match step:
            case PowerStep.FREEZE:
                await self.vm.freeze()
            case PowerStep.THAW:
                await self._take_slot()
                behind_s = time.monotonic() - self._idleness.stopped_s
                await self.vm.thaw(sets_clock=behind_s > self._timeouts.drift_s)
            case PowerStep.SAVE:
                await self.vm.save()
            case PowerStep.RESTORE:
                await self._take_slot()
                await self.vm.restore()

    def _failed(self, step: PowerStep, error: Exception) -> None:
        self._hurries = False
        self._why = f"VM cannot {step.value}: {error}"
        log.warning("%s", self._why)
        self._step = None
        self._wake_waiters("" if step is PowerStep.SAVE else self._why)
        if step is not PowerStep.RESTORE:
            self._act()
        # Else those who waited get the error; the next call tries again.

    def _wake_waiters(self, why: str) -> None:
        """Wake those who wait for a change, and give the run slot back unless it runs."""
        if self._has_slot and self._idleness.state is not PowerState.RUNNING:
            self._has_slot = False
            self._run_slots.give()
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(why)

    async def _take_slot(self) -> None:
        await self._run_slots.take()
        self._has_slot = True

    def _count_jobs(self, count: int) -> None:
        self._idleness = replace(self._idleness, num_jobs=count)
        self._act()
