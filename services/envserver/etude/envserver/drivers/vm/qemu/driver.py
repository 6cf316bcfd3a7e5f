"""QEMU driver: microVMs with KVM or TCG.

STRONG with KVM, where the processor runs the guest. With TCG, QEMU translates the guest's code and
is no isolation boundary; only the jail is, and the level is WEAK: one tenant, trusted templates.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial

from typing_extensions import override

from etude.envserver.drivers.base import IsolationStrength
from etude.envserver.drivers.vm.driver import WARM_POOL, VmDriver
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import VmTemplate
from etude.envserver.drivers.vm.prewarm import prewarm_template
from etude.envserver.drivers.vm.qemu import boot
from etude.envserver.drivers.vm.qemu.command_line import Accelerator, QemuConfig
from etude.envserver.drivers.vm.qemu.fork_server import preload_library
from etude.envserver.drivers.vm.qemu.fork_server.snapshot_servers import SnapshotForkServers
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import ForkServerSupervisor
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.template_cache import QemuTemplateCache
from etude.envserver.drivers.vm.start.cpu_budget import StartWork
from etude.envserver.drivers.vm.start.starter import VmStarter
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.images.built_image import BuiltImage

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class QemuDriver(VmDriver):
    """Its templates are sealed in memory, and cached on disk for the next process."""

    machine: QemuConfig
    name: str = "qemu-microvm"
    strength: IsolationStrength = field(init=False)
    _stems: list[ForkServerSupervisor] = field(default_factory=list)
    _branches: list[SnapshotForkServers] = field(default_factory=list)
    _fresh: set[str] = field(default_factory=set)
    """Addresses of templates that this process booted."""

    @override
    def __post_init__(self) -> None:
        VmDriver.__post_init__(self)
        is_kvm = self.machine.accelerator is Accelerator.KVM
        self.strength = IsolationStrength.STRONG if is_kvm else IsolationStrength.WEAK

    @override
    async def start(self) -> None:
        await VmDriver.start(self)
        # After adopted VMs, whose leases may be waiting. A template that was just booted has none,
        # and its first burst is worth half a second more.
        for keeper in self._stems:
            growing = keeper.ensure_started()
            if growing is not None and keeper.address in self._fresh:
                await growing

    @override
    async def stop(self) -> None:
        while self._branches:
            await self._branches.pop().close()
        while self._stems:
            await self._stems.pop().close()
        await VmDriver.stop(self)

    @override
    async def load_template(self, image: BuiltImage) -> QemuTemplate:
        kept = QemuTemplateCache(folder=self._registry.templates, key=self._registry.key)
        began_s = time.monotonic()
        found = await asyncio.to_thread(
            kept.find, image, self.machine, self._registry.memory_sharers()
        )
        if found is not None:
            took_s = time.monotonic() - began_s
            log.info("template of image %s was loaded in %.2f s", image.name, took_s)
            return found
        made = await self._boot(image)
        try:
            await asyncio.to_thread(kept.store, made)
        except OSError as error:
            log.warning("template of image %s cannot be cached: %s", image.name, error)
        return made

    @override
    def _make_starter(self, base: VmTemplate) -> VmStarter:
        starter = VmDriver._make_starter(self, base)
        # With KVM nothing can be forked, and a disk has one writer.
        can_split = self.machine.accelerator is Accelerator.TCG and not self.machine.has_disk
        if not can_split or not isinstance(base, QemuTemplate):
            return starter
        library, stock = (
            partial(preload_library.preload_library, self.scratch),
            self.scratch / WARM_POOL,
        )
        keeper = ForkServerSupervisor(
            base,
            library=library,
            folder=stock / f"{base.address[:12]}-stem",
            jail=self.jail,
            lanes=self.scheduler,
        )
        self._stems.append(keeper)
        branches = SnapshotForkServers(
            base=base, library=library, folder=stock, jail=self.jail, lanes=self.scheduler
        )
        self._branches.append(branches)
        return replace(starter, spawner=keeper, snapshot_spawners=branches)

    async def _boot(self, image: BuiltImage) -> QemuTemplate:
        folder = self._boot_folder()
        try:
            async with self.scheduler.acquire_start(StartWork.BOOT):
                made = await boot.boot_template(
                    image, self.machine, folder=folder, jail=self.jail, warm_up=prewarm_template
                )
        except (VmmError, GuestLostError) as error:
            raise self._boot_error(image, error) from error
        self._fresh.add(made.address)
        return made
