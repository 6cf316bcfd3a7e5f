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
from etude.envserver.drivers.vm.start.start_scheduler import Places
from etude.envserver.drivers.vm.suspend.idle_policy import Idleness, Patience, State, Step
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_NONE = Patience(linger_s=0.0, job_s=0.0, frozen_s=0.0)


class Sleeper(GuestCaller, Protocol):
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
        ...

    async def keep(self) -> None:
        """Let a successor of this process adopt it from here on."""
        ...

    @property
    def is_lost(self) -> bool:
        """True if it ended unexpectedly, or no longer answers."""
        return False

    async def freeze(self) -> None:
        """Freeze it: it uses no CPU time."""
        ...

    async def thaw(self, *, sets_clock: bool) -> None:
        """Resume it from a freeze.

        Args:
            sets_clock: whether its clock is too far behind.
        """
        ...

    async def save(self) -> None:
        """Suspend a frozen one to disk and free its memory; on error it stays in memory."""
        ...

    async def restore(self) -> None:
        """Restore it from disk, running; after an error it is still on disk."""
        ...

    def shut(self) -> None:
        """Close its egress; safe to repeat."""
        return

    async def destroy(self) -> None:
        """End it in any state, also in the middle of a step."""
        ...


class RestingGuest(GuestCaller):
    """Freezes an idle VM, suspends it to disk later, and resumes it for calls."""

    def __init__(
        self,
        machine: Sleeper,
        places: Places,
        *,
        state: State = State.RUNNING,
        patience: Patience | None = None,
    ) -> None:
        """Start watching a VM.

        Args:
            machine: the VM.
            places: slots for running VMs; a running VM holds one already.
            state: its present state: running, frozen or saved.
            patience: idle timeouts.
        """
        self.machine = machine
        machine.on_jobs = self._count_jobs
        self._places, self._patience = places, patience or Patience()
        now_s = time.monotonic()
        self._seen = Idleness(state=state, quiet_s=now_s, frozen_s=now_s, stopped_s=now_s)
        self._has_place = state is State.RUNNING
        self._hurries = False
        self._step: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future[str] | None = None
        self._why = ""
        self._act()

    @property
    def state(self) -> State:
        """Present power state."""
        return self._seen.state

    @property
    def has_jobs(self) -> bool:
        """True if background commands are known to run in it."""
        return self._seen.num_jobs > 0

    @property
    def is_lost(self) -> bool:
        """True if it has ended or no longer answers."""
        in_memory = {State.RUNNING, State.FREEZING, State.FROZEN, State.THAWING}
        state = self._seen.state
        return state is State.ENDED or (state in in_memory and self.machine.is_lost)

    @override
    async def call(self, request: GuestRequest) -> GuestReply:
        async with self.awake():
            return await self.machine.call(request)

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Keep it running during the block.

        Raises:
            GuestLostError: it has ended, or could not be resumed.
        """
        self._seen, self._hurries = self._seen.called(), False
        try:
            while self._seen.state is not State.RUNNING:
                await self._next_change()
            yield
        finally:
            self._seen = self._seen.answered(now_s=time.monotonic())
            if self._seen.num_calls == 0:
                self._act()

    async def rest(self) -> None:
        """Suspend it to disk now. Nothing calls it meanwhile.

        Raises:
            VmmError: it could not be suspended.
        """
        self._hurries = True
        self._act()
        while self._step is not None:
            await asyncio.wait([self._step])
        self._hurries = False
        if self._seen.state is not State.SAVED:
            raise VmmError(self._why or "the VM was called while it was being suspended")

    async def destroy(self) -> None:
        """End it; safe to repeat."""
        self._seen = replace(self._seen, state=State.ENDED)
        self._why = self._why or "the VM of this lease has ended"
        if self._step is not None:
            self._step.cancel()
            await asyncio.wait([self._step])
            self._step = None
        self._settle(self._why)
        await self.machine.destroy()

    async def _next_change(self) -> None:
        """Wait for a change of state.

        Raises:
            GuestLostError: it could not be resumed.
        """
        if self._seen.state is State.ENDED:
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
        patience = _NONE if self._hurries else self._patience
        due = self._seen.due(patience, now_s=time.monotonic())
        if due.step is not None:
            self._seen = self._seen.begun(due.step)
            self._step = asyncio.create_task(self._take(due.step), name=f"{due.step.value} a guest")
        elif due.again_s is not None:
            self._timer = asyncio.get_running_loop().call_later(due.again_s, self._act)

    async def _take(self, step: Step) -> None:
        try:
            await self._perform(step)
        except (UnavailableError, CorruptError, OSError) as error:
            self._seen = self._seen.failed(step, now_s=time.monotonic())
            self._failed(step, error)
        else:
            self._seen = self._seen.done(step, now_s=time.monotonic())
            metrics.suspensions.labels(step.value).inc()
            self._step = None
            self._settle("")
            self._act()

    async def _perform(self, step: Step) -> None:
        match step:
            case Step.FREEZE:
                await self.machine.freeze()
            case Step.THAW:
                await self._take_place()
                behind_s = time.monotonic() - self._seen.stopped_s
                await self.machine.thaw(sets_clock=behind_s > self._patience.drift_s)
            case Step.SAVE:
                await self.machine.save()
            case Step.RESTORE:
                await self._take_place()
                await self.machine.restore()

    def _failed(self, step: Step, error: Exception) -> None:
        self._hurries = False
        self._why = f"VM cannot {step.value}: {error}"
        log.warning("%s", self._why)
        self._step = None
        self._settle("" if step is Step.SAVE else self._why)
        if step is not Step.RESTORE:
            self._act()
        # Else those who waited get the error; the next call tries again.

    def _settle(self, why: str) -> None:
        """Wake those who wait for a change, and give the run slot back unless it runs."""
        if self._has_place and self._seen.state is not State.RUNNING:
            self._has_place = False
            self._places.give()
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(why)

    async def _take_place(self) -> None:
        await self._places.take()
        self._has_place = True

    def _count_jobs(self, count: int) -> None:
        self._seen = replace(self._seen, num_jobs=count)
        self._act()
