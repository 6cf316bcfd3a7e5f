"""Fork servers of a driver: the one interface of this folder to the rest of the QEMU driver.

Without this folder a driver starts each VM from the warm pool or a new VMM: QemuDriver drops its
field `fork_servers`, and VmStarter's two spawners stay None.

A saved state that several starts need together is restored only twice.

A group of rollouts forks one environment. A restore for each start would need a VMM for each, which
translates all code again. Here the first start restores the state, the second one makes a fork
server of it, and all others that wait or come soon after are children of that. A state that starts
one after the other need, as in rollbacks, is restored each time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import VmDelta, VmTemplate
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.fork_server.preload_library import preload_library
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import ForkServerSupervisor
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.starter import VmStarter

_START_LIMIT_S = 3.0
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

    template: QemuTemplate
    library: Callable[[], Path | None]
    """Finds the preload library. May block."""
    folder: Path
    """Parent of the fork servers' folders."""
    jail: Jail
    scheduler: StartScheduler
    _servers: dict[str, _SnapshotServer] = field(default_factory=dict)
    """By the digest of the saved state."""
    _ending: set["asyncio.Task[None]"] = field(default_factory=set)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.scheduler.on_crowded(self._evict)

    @asynccontextmanager
    async def spawner_of(self, saved: VmDelta) -> AsyncIterator[ForkServerSupervisor | None]:
        """Open the fork server of a state; None for a start that is alone with it.

        It lives as long as any start needs the same state, and a while longer.

        Raises:
            VmmError: the driver is stopping.
        """
        self._check_open()
        server = self._servers.setdefault(saved.digest, _SnapshotServer())
        server.num_wanted += 1
        if server.lingering is not None:
            server.lingering.cancel()
            server.lingering = None
        try:
            if server.num_wanted > 1 and saved.digest:
                await self._start_server(server, saved)
                self._check_open()
            yield server.supervisor
        finally:
            server.num_wanted -= 1
            if not server.num_wanted:
                self._release(saved.digest, server)

    async def close(self) -> None:
        self._is_closed = True
        self.scheduler.remove_crowded(self._evict)
        while self._servers:
            _, server = self._servers.popitem()
            if server.lingering is not None:
                server.lingering.cancel()
            if server.supervisor is not None:
                await server.supervisor.close()
        if self._ending:
            await asyncio.wait(self._ending)

    def _check_open(self) -> None:
        if self._is_closed:
            raise VmmError("the driver is stopping")

    def _evict(self) -> None:
        """Free memory for a waiting start: a fork server only makes starts faster."""
        for server in self._servers.values():
            supervisor = server.supervisor
            if supervisor is not None and supervisor.is_ready:
                server.supervisor = None
                ending = asyncio.create_task(supervisor.close(), name="end a server")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def _release(self, digest: str, server: _SnapshotServer) -> None:
        if server.supervisor is None:
            if self._servers.get(digest) is server:
                del self._servers[digest]
        else:
            left = self._close_later(digest, server.supervisor)
            server.lingering = asyncio.create_task(left, name="a server lingers")

    async def _close_later(self, digest: str, supervisor: ForkServerSupervisor) -> None:
        await asyncio.sleep(_LINGER_S)
        # Not found from here on: a later start makes another.
        self._servers.pop(digest, None)
        await supervisor.close()

    async def _start_server(self, server: _SnapshotServer, saved: VmDelta) -> None:
        if server.starting is not None:
            await asyncio.wait([server.starting], timeout=_START_LIMIT_S)
            return
        supervisor = ForkServerSupervisor(
            self.template,
            library=self.library,
            folder=self.folder / f"{saved.digest[:12]}-fork-server",
            jail=self.jail,
            scheduler=self.scheduler,
            saved=saved,
        )
        starting = server.starting = supervisor.ensure_started()
        if starting is None:
            return
        server.supervisor = supervisor
        try:
            await asyncio.wait([starting], timeout=_START_LIMIT_S)
        finally:
            if not starting.done():
                # The state's files belong to the caller, who closes them.
                server.supervisor = None
                await supervisor.close()


@dataclass(slots=True)
class ForkServers:
    """One fork server of each template, and those of saved states."""

    _servers: list[ForkServerSupervisor] = field(default_factory=list)
    _snapshots: list[SnapshotForkServers] = field(default_factory=list)

    def attach(self, starter: VmStarter, template: QemuTemplate, scratch: Path) -> VmStarter:
        """Let a template's starter spawn child VMs."""
        library = partial(preload_library, scratch)
        folder = starter.warm_pool.folder
        server = ForkServerSupervisor(
            template,
            library=library,
            folder=folder / f"{template.address[:12]}-fork-server",
            jail=starter.jail,
            scheduler=starter.scheduler,
        )
        snapshots = SnapshotForkServers(
            template=template,
            library=library,
            folder=folder,
            jail=starter.jail,
            scheduler=starter.scheduler,
        )
        self._servers.append(server)
        self._snapshots.append(snapshots)
        return replace(starter, spawner=server, snapshot_spawners=snapshots)

    async def start(self, awaited: Collection[str]) -> None:
        """Start the templates' fork servers, and wait for those of some addresses."""
        for server in self._servers:
            starting = server.ensure_started()
            if starting is not None and server.address in awaited:
                await starting

    async def detach(self, template: VmTemplate) -> None:
        """End the fork servers of a template that is closed; their children go on."""
        for snapshots in [each for each in self._snapshots if each.template is template]:
            self._snapshots.remove(snapshots)
            await snapshots.close()
        for server in [each for each in self._servers if each.template is template]:
            self._servers.remove(server)
            await server.close()

    async def close(self) -> None:
        """End all fork servers; their children go on."""
        while self._snapshots:
            await self._snapshots.pop().close()
        while self._servers:
            await self._servers.pop().close()
