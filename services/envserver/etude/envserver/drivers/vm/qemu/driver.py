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

from etude.envserver.drivers.base import Strength
from etude.envserver.drivers.vm.driver import STOCK, MachineDriver
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import Base
from etude.envserver.drivers.vm.prewarm import warm_up
from etude.envserver.drivers.vm.qemu import boot
from etude.envserver.drivers.vm.qemu.command_line import Accelerator, Machine
from etude.envserver.drivers.vm.qemu.fork_server import preload_library
from etude.envserver.drivers.vm.qemu.fork_server.snapshot_servers import Branches
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import StemKeeper
from etude.envserver.drivers.vm.qemu.template import Template
from etude.envserver.drivers.vm.qemu.template_cache import Kept
from etude.envserver.drivers.vm.start.cpu_budget import Work
from etude.envserver.drivers.vm.start.starter import Starter
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.images.built_image import BuiltImage

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class QemuDriver(MachineDriver):
    """Its templates are sealed in memory, and cached on disk for the next process."""

    machine: Machine
    name: str = "qemu-microvm"
    strength: Strength = field(init=False)
    _stems: list[StemKeeper] = field(default_factory=list)
    _branches: list[Branches] = field(default_factory=list)
    _fresh: set[str] = field(default_factory=set)
    """Addresses of templates that this process booted."""

    @override
    def __post_init__(self) -> None:
        MachineDriver.__post_init__(self)
        is_kvm = self.machine.accelerator is Accelerator.KVM
        self.strength = Strength.STRONG if is_kvm else Strength.WEAK

    @override
    async def start(self) -> None:
        await MachineDriver.start(self)
        # After adopted VMs, whose leases may be waiting. A template that was just booted has none,
        # and its first burst is worth half a second more.
        for keeper in self._stems:
            growing = keeper.tend()
            if growing is not None and keeper.address in self._fresh:
                await growing

    @override
    async def stop(self) -> None:
        while self._branches:
            await self._branches.pop().close()
        while self._stems:
            await self._stems.pop().close()
        await MachineDriver.stop(self)

    @override
    async def base(self, image: BuiltImage) -> Template:
        kept = Kept(folder=self._estate.templates, key=self._estate.key)
        began_s = time.monotonic()
        found = await asyncio.to_thread(kept.find, image, self.machine, self._estate.lenders())
        if found is not None:
            took_s = time.monotonic() - began_s
            log.info("template of image %s was loaded in %.2f s", image.name, took_s)
            return found
        made = await self._booted(image)
        try:
            await asyncio.to_thread(kept.keep, made)
        except OSError as error:
            log.warning("template of image %s cannot be cached: %s", image.name, error)
        return made

    @override
    def _starter(self, base: Base) -> Starter:
        starter = MachineDriver._starter(self, base)
        # With KVM nothing can be forked, and a disk has one writer.
        can_split = self.machine.accelerator is Accelerator.TCG and not self.machine.has_disk
        if not can_split or not isinstance(base, Template):
            return starter
        library, stock = partial(preload_library.library, self.scratch), self.scratch / STOCK
        keeper = StemKeeper(
            base,
            library=library,
            folder=stock / f"{base.address[:12]}-stem",
            jail=self.jail,
            lanes=self.lanes,
        )
        self._stems.append(keeper)
        branches = Branches(
            base=base, library=library, folder=stock, jail=self.jail, lanes=self.lanes
        )
        self._branches.append(branches)
        return replace(starter, stems=keeper, branches=branches)

    async def _booted(self, image: BuiltImage) -> Template:
        folder = self._boot_folder()
        try:
            async with self.lanes.turn(Work.BOOT):
                made = await boot.booted(
                    image, self.machine, folder=folder, jail=self.jail, warm_up=warm_up
                )
        except (VmmError, GuestLostError) as error:
            raise self._unbootable(image, error) from error
        self._fresh.add(made.address)
        return made
