"""Fork servers of saved states: a state that several starts need together is restored only twice.

A group of rollouts forks one environment. A restore for each start would need a VMM for each, which
translates all code again. Here the first start restores the state, the second one makes a fork
server of it, and all others that wait or come soon after are children of that. A state that starts
one after the other need, as in rollbacks, is restored each time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import ForkServerSupervisor
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler

_GROW_LIMIT_S = 3.0
"""It takes 0.2 s, but a saved guest may not answer, and waiting starts block others."""
_LINGER_S = 2.0
"""Starts of a group come one after the other, as run slots become free."""


@dataclass(slots=True)
class _SnapshotServer:
    num_wanted: int = 0
    supervisor: ForkServerSupervisor | None = None
    starting: "asyncio.Task[None] | None" = None
    lingering: "asyncio.Task[None] | None" = None
    """Ends an unused server."""


@dataclass(slots=True, kw_only=True)
class SnapshotForkServers:
    """Fork servers of one template's saved states."""

    base: QemuTemplate
    library: Callable[[], Path | None]
    """Finds the preload library. May block."""
    folder: Path
    """Parent of the fork servers' folders."""
    jail: Jail
    lanes: StartScheduler
    _branches: dict[str, _SnapshotServer] = field(default_factory=dict)
    """By the digest of the saved state."""
    _ending: set["asyncio.Task[None]"] = field(default_factory=set)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.lanes.on_crowded(self._evict)

    @asynccontextmanager
    async def of(self, saved: VmDelta) -> AsyncIterator[ForkServerSupervisor | None]:
        """Open the fork server of a state; None for a start that is alone with it.

        It lives as long as any start needs the same state, and a while longer.

        Raises:
            VmmError: the driver is stopping.
        """
        self._check_open()
        branch = self._branches.setdefault(saved.digest, _SnapshotServer())
        branch.num_wanted += 1
        if branch.lingering is not None:
            branch.lingering.cancel()
            branch.lingering = None
        try:
            if branch.num_wanted > 1 and saved.digest:
                await self._start_server(branch, saved)
                self._check_open()
            yield branch.supervisor
        finally:
            branch.num_wanted -= 1
            if not branch.num_wanted:
                self._release(saved.digest, branch)

    async def close(self) -> None:
        """End all servers; their children go on. Waiting starts are refused."""
        self._is_closed = True
        while self._branches:
            _, branch = self._branches.popitem()
            if branch.lingering is not None:
                branch.lingering.cancel()
            if branch.supervisor is not None:
                await branch.supervisor.close()
        if self._ending:
            await asyncio.wait(self._ending)

    def _check_open(self) -> None:
        if self._is_closed:
            raise VmmError("the driver is stopping")

    def _evict(self) -> None:
        """Free memory for a waiting start: a fork server only makes starts faster."""
        for branch in self._branches.values():
            keeper = branch.supervisor
            if keeper is not None and keeper.is_ready:
                branch.supervisor = None
                ending = asyncio.create_task(keeper.close(), name="end a branch")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def _release(self, digest: str, branch: _SnapshotServer) -> None:
        if branch.supervisor is None:
            if self._branches.get(digest) is branch:
                del self._branches[digest]
        else:
            left = self._close_later(digest, branch.supervisor)
            branch.lingering = asyncio.create_task(left, name="a branch lingers")

    async def _close_later(self, digest: str, keeper: ForkServerSupervisor) -> None:
        await asyncio.sleep(_LINGER_S)
        # Not found from here on: a later start makes another.
        self._branches.pop(digest, None)
        await keeper.close()

    async def _start_server(self, branch: _SnapshotServer, saved: VmDelta) -> None:
        if branch.starting is not None:
            await asyncio.wait([branch.starting], timeout=_GROW_LIMIT_S)
            return
        keeper = ForkServerSupervisor(
            self.base,
            library=self.library,
            folder=self.folder / f"{saved.digest[:12]}-stem",
            jail=self.jail,
            lanes=self.lanes,
            saved=saved,
        )
        growing = branch.starting = keeper.ensure_started()
        if growing is None:
            return
        branch.supervisor = keeper
        try:
            await asyncio.wait([growing], timeout=_GROW_LIMIT_S)
        finally:
            if not growing.done():
                # The state's files belong to the caller, who closes them.
                branch.supervisor = None
                await keeper.close()
