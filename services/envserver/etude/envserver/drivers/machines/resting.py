"""A guest that stands still while nobody calls it, and is there when somebody does."""

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
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.idle import Idleness, Patience, State, Step
from etude.envserver.drivers.machines.lanes import Places
from etude.envserver.guest.calls import Caller, Reply, Request
from etude.envserver.guest.channel import GuestLostError

log = logging.getLogger(__name__)

_NONE = Patience(linger_s=0.0, job_s=0.0, frozen_s=0.0)


class Sleeper(Caller, Protocol):
    """A machine that can be stopped and saved between calls. Steps raise UnavailableError."""

    on_jobs: Callable[[int], None]
    """Told how many commands run in its background, whenever that changes."""
    generation: int
    """How often it was made."""

    async def copy(self, path: Path, *, max_bytes: int) -> None:
        """Write it to a file while it runs; it goes on.

        Raises:
            TooLargeError: the file would be larger.
        """
        ...

    async def keep(self) -> None:
        """Have a successor of this process go on with it from here on."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it ended without being told to, or no longer answers."""
        return False

    async def freeze(self) -> None:
        """Stop it: from here on it uses no CPU time."""
        ...

    async def thaw(self, *, sets_clock: bool) -> None:
        """Let it go on.

        Args:
            sets_clock: whether it stood still for long.
        """
        ...

    async def save(self) -> None:
        """Write a stopped one to the disk and give its memory back; after an error it is there."""
        ...

    async def restore(self) -> None:
        """Make it again from the disk, running; after an error it is still saved."""
        ...

    def shut(self) -> None:
        """Leave it no way out any more; safe to repeat."""
        return

    async def destroy(self) -> None:
        """End it, whatever state it is in, also in the middle of a step."""
        ...


class RestingGuest(Caller):
    """Calls wake the machine; it is stopped soon after the last one, and saved when none comes."""

    def __init__(
        self,
        machine: Sleeper,
        places: Places,
        *,
        state: State = State.RUNNING,
        patience: Patience | None = None,
    ) -> None:
        """Begin to watch a machine.

        Args:
            machine: what rests.
            places: of the node, for machines that run; a running machine has taken one.
            state: what it does now: it runs, stands still, or is saved.
            patience: how long it is left as it is.
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
        """What it does now."""
        return self._seen.state

    @property
    def has_jobs(self) -> bool:
        """Whether background commands run in it, as far as it has told."""
        return self._seen.num_jobs > 0

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be done with it any more."""
        in_memory = {State.RUNNING, State.FREEZING, State.FROZEN, State.THAWING}
        state = self._seen.state
        return state is State.ENDED or (state in in_memory and self.machine.is_lost)

    @override
    async def call(self, request: Request) -> Reply:
        async with self.awake():
            return await self.machine.call(request)

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """A time in which it runs.

        Raises:
            GuestLostError: it has ended, or could not be woken.
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
        """Have it saved now. Nothing calls it meanwhile.

        Raises:
            VmmError: it could not be saved.
        """
        self._hurries = True
        self._act()
        while self._step is not None:
            await asyncio.wait([self._step])
        self._hurries = False
        if self._seen.state is not State.SAVED:
            raise VmmError(self._why or "the machine was called while it was to be saved")

    async def destroy(self) -> None:
        """End it; safe to repeat."""
        self._seen = replace(self._seen, state=State.ENDED)
        self._why = self._why or "the machine of this lease has ended"
        if self._step is not None:
            self._step.cancel()
            await asyncio.wait([self._step])
            self._step = None
        self._settle(self._why)
        await self.machine.destroy()

    async def _next_change(self) -> None:
        """Wait until it does something else.

        Raises:
            GuestLostError: it could not be woken.
        """
        if self._seen.state is State.ENDED:
            raise GuestLostError(self._why)
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        changed = self._changed
        self._act()
        # Others wait for the same, and stay when this one goes.
        why = await asyncio.shield(changed)
        if why:
            raise GuestLostError(why)

    def _act(self) -> None:
        """Do what is due, or look again when something will be."""
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
            metrics.rests.labels(step.value).inc()
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
        self._why = f"it was not possible to {step.value} the machine: {error}"
        log.warning("%s", self._why)
        self._step = None
        self._settle("" if step is Step.SAVE else self._why)
        if step is not Step.RESTORE:
            self._act()
        # Else whoever waited is told first; who comes later tries again.

    def _settle(self, why: str) -> None:
        """Tell whoever waits for a change, and leave the place to another if it does not run."""
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
