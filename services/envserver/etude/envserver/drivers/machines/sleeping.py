"""The machine of one lease: it can be stopped, written to the disk, and made again from there.

What is on the disk is what the machine is, for as long as it is there: it is written before the
monitor ends, and removed before the next monitor's guest gets a call.
"""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from typing_extensions import override

from etude.common.errors import CorruptError
from etude.envserver import metrics
from etude.envserver.drivers.base import Begun
from etude.envserver.drivers.machines import guests, record, stored
from etude.envserver.drivers.machines.census import MACHINE
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.guests import Guest
from etude.envserver.drivers.machines.idle import Patience, State
from etude.envserver.drivers.machines.lanes import Places
from etude.envserver.drivers.machines.livejobs import LiveJobs
from etude.envserver.drivers.machines.pages import PageBuffer
from etude.envserver.drivers.machines.protocol import Delta
from etude.envserver.drivers.machines.resting import RestingGuest, Sleeper
from etude.envserver.drivers.machines.starts import Started, Starter
from etude.envserver.drivers.machines.stored import Proven
from etude.envserver.egress.gate import Gate
from etude.envserver.egress.guests import GuestDoor
from etude.envserver.folders import TooLargeError
from etude.envserver.guest.calls import Reply, Request
from etude.v1 import guest_pb2

_T = TypeVar("_T")

_FILE = re.compile(r"asleep\.(\d{1,18})")
_PING_LIMIT_S = 10.0
"""A guest answers in a millisecond; its host may have much else to do."""
TOUCHED_BYTES = 4 << 20
"""Of a clone that was little used; the buffer grows with what is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """Where machines of a node sleep: files that it writes and believes again."""

    key: bytes
    """What the node proves with that it wrote a file itself."""
    buffer: PageBuffer
    proven: Proven = field(default_factory=Proven)


def asleep(lease: Path) -> Path | None:
    """The file of a lease's machine that sleeps; None if it does not."""
    try:
        found = [path for path in lease.iterdir() if _FILE.fullmatch(path.name)]
    except FileNotFoundError:
        return None
    return found[0] if found else None


class Clone(Sleeper):
    """A clone of a template, of one lease."""

    on_jobs: Callable[[int], None]

    def __init__(
        self,
        lease: Path,
        starter: Callable[[], Starter],
        bed: Bed,
        guest: Guest | None,
        gate: Gate | None = None,
    ) -> None:
        """A machine that runs, or one that sleeps.

        Args:
            lease: the lease's folder.
            starter: of its template.
            bed: where it sleeps.
            guest: the machine; unset if it sleeps.
            gate: its way out, if it has one.
        """
        self._gate = gate
        self._door: GuestDoor | None = None
        self._lease, self._starter, self._bed = lease, starter, bed
        self._guest = guest
        self._jobs = LiveJobs(guest.jobs if guest is not None else ())
        self.generation = guest.identity.generation if guest is not None else _generation(lease)
        self.on_jobs = lambda _: None
        if guest is not None:
            guest.channel.on_event = self._told
            if guest.is_met:
                self._open_door(guest)

    @override
    async def keep(self) -> None:
        guest = self._awake
        try:
            await asyncio.to_thread(
                record.begin,
                guest.vm.folder,
                env_id=guest.identity.env_id,
                generation=guest.identity.generation,
            )
        except (OSError, CorruptError) as cause:
            raise VmmError(f"machine {guest.vm.pid} cannot be written down: {cause}") from cause

    @override
    async def call(self, request: Request) -> Reply:
        call = request.operation
        with self._jobs.watching(call):
            reply = await self._awake.channel.call(request)
            self._jobs.answered(call, reply.result)
        self.on_jobs(len(self._jobs.running))
        return reply

    @property
    @override
    def is_lost(self) -> bool:
        guest = self._guest
        if guest is None:
            return False
        return guest.vm.exited.done() or (guest.is_met and guest.channel.is_lost)

    @override
    async def freeze(self) -> None:
        await self._awake.vm.freeze()

    @override
    async def thaw(self, *, sets_clock: bool) -> None:
        guest = self._awake
        await guest.vm.thaw()
        if not guest.is_met:
            meet = guests.met if guest.vm.keeps_channel else guests.met_again
            self._take(await meet(guest))
        elif sets_clock:
            # Its names are what they were, and are not written again.
            await guest.channel.sync(replace(guest.identity, hostname="", machine_id=b""))

    @override
    async def copy(self, path: Path, *, max_bytes: int) -> None:
        guest, base = self._awake, self._starter().base
        # From the answer on the guest stands between two frames.
        if not await guest.channel.ping(timeout_s=_PING_LIMIT_S):
            raise VmmError(f"the guest of machine {guest.vm.pid} does not answer")
        try:
            saved = await base.take(guest.vm, self._bed.buffer, keep_running=True)
        finally:
            if not guest.vm.keeps_channel:  # whether it was written or not
                self._take(await guests.met_again(guest))
        try:
            metrics.pause_seconds.observe(saved.pause_s)
            size = os.fstat(saved.stream).st_size
            if size > max_bytes:
                raise TooLargeError(f"the machine has changed {size} bytes")
            await _finished(partial(stored.save, saved, path, key=self._bed.key))
        finally:
            saved.close()

    @override
    async def save(self) -> None:
        guest, base = self._awake, self._starter().base
        if not guest.vm.keeps_channel:
            # If it cannot be written, it goes on, and is met once more.
            await guest.channel.close()
            guest = self._guest = replace(guest, is_met=False)
        saved = await base.take(guest.vm, self._bed.buffer, keep_running=False)
        path = self._lease / f"asleep.{self.generation}"
        try:
            await _finished(partial(stored.save, saved, path, key=self._bed.key))
        finally:
            saved.close()
        await guest.destroy()
        self._guest = None

    @override
    async def restore(self) -> None:
        path = asleep(self._lease)
        if path is None:
            raise VmmError(f"the file of the machine of lease {self._lease.name} is gone")
        name, folder = self._lease.name, self._lease / MACHINE
        address = self._starter().base.address
        bed = self._bed
        saved = await loaded(
            partial(stored.load, path, key=bed.key, template=address, proven=bed.proven)
        )
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.generation += 1
            started = await self._starter().start(
                name, folder, saved=saved, generation=self.generation
            )
        finally:
            saved.close()
        self._guest = started.guest
        try:
            await self.keep()
            path.unlink()
        except BaseException:
            self._guest = None
            await started.guest.destroy()
            raise
        self._take(started.guest)

    @override
    def shut(self) -> None:
        self._gate = None
        if self._door is not None:
            self._door.close()

    @override
    async def destroy(self) -> None:
        self.shut()
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.destroy()

    @property
    def _awake(self) -> Guest:
        if self._guest is None:
            raise VmmError("the machine is not in memory")
        return self._guest

    def _take(self, guest: Guest) -> None:
        """Go on with a guest as it is known from its last RESET on."""
        self._guest = guest
        self._jobs = LiveJobs(guest.jobs)
        guest.channel.on_event = self._told
        self._open_door(guest)
        self.on_jobs(len(self._jobs.running))

    def _open_door(self, guest: Guest) -> None:
        """Serve its connections; those of before its last RESET have ended with that."""
        if self._door is not None:
            self._door.close()
        self._door = GuestDoor(guest.channel, self._gate) if self._gate is not None else None

    def _told(self, event: guest_pb2.GuestEvent) -> None:
        self._jobs.told(event)
        self.on_jobs(len(self._jobs.running))


class Launched(NamedTuple):
    """A machine of a lease, and how it came to be."""

    guest: RestingGuest
    begun: Begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where the machine of one lease is made, runs, sleeps and is found again."""

    lease: Path
    """The lease's folder."""
    start: Callable[[Path], Awaitable[Started]]
    """Makes the machine in an empty folder."""
    starter: Callable[[], Starter]
    """Of its template; raises SandboxError while there is none."""
    bed: Bed
    places: Places
    """Of the node, for machines that run."""
    patience: Patience
    gate: Gate | None = None
    """Its way out, if it has one."""

    async def launch(self, folder: Path) -> Launched:
        """A machine that runs and answers, in an empty folder."""
        asked_s = time.monotonic()
        await self.places.take()
        try:
            started = await self.start(folder)
        except BaseException:
            self.places.give()
            raise
        begun = Begun(started.start, time.monotonic() - asked_s)
        return Launched(self._resting(started.guest), begun)

    def find(self, guest: Guest | None) -> RestingGuest | None:
        """The machine that an earlier process began; None if none did.

        Args:
            guest: it, if it ran on.
        """
        path = asleep(self.lease)
        if guest is not None:
            # No call has come to it since it was written to the disk, if it was.
            if path is not None:
                path.unlink()
            if guest.is_met:
                self.places.enter()
            return self._resting(guest)
        return self._resting(None) if path is not None else None

    def _resting(self, guest: Guest | None) -> RestingGuest:
        machine = Clone(self.lease, self.starter, self.bed, guest, self.gate)
        state = State.SAVED
        if guest is not None:
            state = State.RUNNING if guest.is_met else State.FROZEN
        return RestingGuest(machine, self.places, state=state, patience=self.patience)


def _generation(lease: Path) -> int:
    path = asleep(lease)
    match = _FILE.fullmatch(path.name) if path is not None else None
    return int(match[1]) if match else 0


async def loaded(load: Callable[[], Delta]) -> Delta:
    """A saved machine that a thread reads.

    Raises:
        CancelledError: nobody waits for it any more; none of its files is left open.
    """
    thread = asyncio.create_task(asyncio.to_thread(load), name="load a machine")
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        if not thread.cancelled() and thread.exception() is None:
            thread.result().close()
        raise


async def _finished(work: Callable[[], _T]) -> _T:
    """What a thread did; who is cancelled waits for its end too, since it uses open files."""
    thread = asyncio.create_task(asyncio.to_thread(work), name="asleep")
    try:
        return await asyncio.shield(thread)
    finally:
        await asyncio.wait([thread])
