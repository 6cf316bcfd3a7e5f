"""QEMU driver: microVMs with KVM or TCG.

STRONG with KVM, where the processor runs the guest. With TCG, QEMU translates the guest's code and
is no isolation boundary; only the jail is, and the level is WEAK: one tenant, trusted templates.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from typing_extensions import override

from etude.envserver.drivers.base import IsolationStrength
from etude.envserver.drivers.vm import uid_pool, vm_record
from etude.envserver.drivers.vm.driver import VmDriver
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import Vmm, VmTemplate
from etude.envserver.drivers.vm.prewarm import prewarm_template
from etude.envserver.drivers.vm.qemu import boot
from etude.envserver.drivers.vm.qemu.command_line import Accelerator, QemuConfig
from etude.envserver.drivers.vm.qemu.fork_server.fork_servers import ForkServers
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
    fork_servers: ForkServers = field(default_factory=ForkServers)
    _fresh: set[str] = field(default_factory=set)
    """Addresses of templates that this process booted."""

    @override
    def __post_init__(self) -> None:
        VmDriver.__post_init__(self)
        is_kvm = self.machine.accelerator is Accelerator.KVM
        self.strength = IsolationStrength.STRONG if is_kvm else IsolationStrength.WEAK
        if uid_pool.are_mapped():
            self.jail = replace(self.jail, users=self.uids)

    @override
    async def start(self) -> None:
        await VmDriver.start(self)
        # After adopted VMs, whose leases may be waiting. A template that was just booted has none,
        # and its first burst is worth half a second more.
        await self.fork_servers.start(self._fresh)

    @override
    async def stop(self) -> None:
        await self.fork_servers.close()
        await VmDriver.stop(self)

    @override
    async def load_template(self, image: BuiltImage) -> QemuTemplate:
        cache = QemuTemplateCache(folder=self._registry.templates, key=self._registry.key)
        began_s = time.monotonic()
        sharers = self._registry.memory_sharers()
        template = await asyncio.to_thread(cache.find, image, self.machine, sharers)
        if template is not None:
            took_s = time.monotonic() - began_s
            log.info("template of image %s was loaded in %.2f s", image.name, took_s)
            return template
        template = await self._boot(image)
        try:
            await asyncio.to_thread(cache.store, template)
        except OSError as error:
            log.warning("template of image %s cannot be cached: %s", image.name, error)
        return template

    @override
    async def _adopt(self, templates: Sequence[VmTemplate]) -> list[Vmm]:
        adopted = await VmDriver._adopt(self, templates)
        for vmm in adopted:
            noted = vm_record.load(vmm.folder)
            if noted is not None:
                vmm.exited.add_done_callback(partial(self._free_user, noted.uid))
        return adopted

    def _free_user(self, uid: int, _exited: "asyncio.Future[int | None]") -> None:
        self.uids.give(uid)

    @override
    def _make_starter(self, template: VmTemplate) -> VmStarter:
        starter = VmDriver._make_starter(self, template)
        can_fork = self.machine.accelerator is Accelerator.TCG  # with KVM nothing can be forked
        if not can_fork or not isinstance(template, QemuTemplate):
            return starter
        return self.fork_servers.attach(starter, template, self.scratch)

    @override
    async def _close_starter(self, starter: VmStarter) -> None:
        await self.fork_servers.detach(starter.template)
        await VmDriver._close_starter(self, starter)

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
