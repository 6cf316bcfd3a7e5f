"""Fork servers of a driver: the one interface of this folder to the rest of the QEMU driver.

Without this folder a driver starts each VM from the warm pool or a new VMM: QemuDriver drops its
field `fork_servers`, and VmStarter's two spawners stay None.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from etude.envserver.drivers.vm.qemu.fork_server.preload_library import preload_library
from etude.envserver.drivers.vm.qemu.fork_server.snapshot_servers import SnapshotForkServers
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import ForkServerSupervisor
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.start.starter import VmStarter


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

    async def close(self) -> None:
        """End all fork servers; their children go on."""
        while self._snapshots:
            await self._snapshots.pop().close()
        while self._servers:
            await self._servers.pop().close()
