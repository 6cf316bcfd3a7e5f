"""Firecracker driver: the processor runs the guests, so the level is STRONG."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from etude.common.errors import CorruptError
from etude.envserver.drivers.base import Strength
from etude.envserver.drivers.vm.driver import MachineDriver
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import (
    jail,
    memory_files,
    template,
    uid_pool,
    vmm_processes,
)
from etude.envserver.drivers.vm.firecracker.api_requests import FireMachine
from etude.envserver.drivers.vm.firecracker.compatibility import compat_key
from etude.envserver.drivers.vm.firecracker.jail import Programs
from etude.envserver.drivers.vm.firecracker.template import FireTemplate
from etude.envserver.drivers.vm.firecracker.template_cache import Kept
from etude.envserver.drivers.vm.firecracker.uid_pool import Users
from etude.envserver.drivers.vm.firecracker.vm import Ground
from etude.envserver.drivers.vm.firecracker.vmlinux import vmlinux
from etude.envserver.drivers.vm.firecracker.vmm_processes import FirePlaces
from etude.envserver.drivers.vm.prewarm import warm_up
from etude.envserver.drivers.vm.start.cpu_budget import Work
from etude.envserver.drivers.vm.vmm_processes import recorded
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.images.built_image import BuiltImage


@dataclass(slots=True, kw_only=True)
class FirecrackerDriver(MachineDriver):
    """Its templates are files, hard-linked into the jail of each clone."""

    machine: FireMachine
    programs: Programs
    name: str = "firecracker"
    strength: Strength = Strength.STRONG
    _users: Users | None = None
    _ground: Ground | None = None

    @override
    def places(self) -> FirePlaces:
        return FirePlaces(scratch=self.scratch)

    @override
    async def base(self, image: BuiltImage) -> FireTemplate:
        try:
            return await self._template(image)
        except (VmmError, GuestLostError, CorruptError, OSError) as error:
            raise self._unbootable(image, error) from error

    @override
    async def stop(self) -> None:
        await MachineDriver.stop(self)
        if self._ground is not None:
            os.close(self._ground.netns)
            self._ground = None

    async def _template(self, image: BuiltImage) -> FireTemplate:
        kept = Kept(folder=self._estate.templates, key=self._estate.key)
        ground, users = self._standing(), self._known_users()
        key = await asyncio.to_thread(compat_key, self.programs.firecracker, self.machine, image)
        address = await asyncio.to_thread(kept.find, key)
        if address is None:
            await self._boot(image, kept, key, ground, users)
            address = await asyncio.to_thread(kept.find, key)
        if address is None:
            raise VmmError("the cached files are not what was written")
        return FireTemplate(
            address=address,
            compat_key=key,
            machine=self.machine,
            folder=kept.at(key),
            ground=ground,
            users=users,
        )

    async def _boot(
        self, image: BuiltImage, kept: Kept, key: str, ground: Ground, users: Users
    ) -> None:
        folder = self._boot_folder()
        kernel = folder.with_name(f"{folder.name}.vmlinux")
        try:
            await asyncio.to_thread(_unpack, image, kernel)
            async with self.lanes.turn(Work.BOOT):
                running = await template.spawned(self.machine, ground, users, folder=folder)
                with kept.making(key) as target:
                    await template.booted(image, kernel, running, target=target, warm_up=warm_up)
        finally:
            kernel.unlink(missing_ok=True)

    def _standing(self) -> Ground:
        if self._ground is None:
            if not memory_files.has_small_holes(self.scratch):
                raise VmmError(f"{self.scratch}: its file system has blocks larger than a page")
            mine = vmm_processes.prefix(self.scratch)
            jail.remove(self.programs.firecracker.name, mine)
            self._ground = Ground(
                programs=self.programs, prefix=mine, netns=uid_pool.empty_network()
            )
        return self._ground

    def _known_users(self) -> Users:
        if self._users is None:
            self._users = Users()
            self._users.keep(noted.uid for noted in recorded(self.places()).values())
        return self._users


def _unpack(image: BuiltImage, target: Path) -> None:
    target.write_bytes(vmlinux(image.kernel.read_bytes()))
    target.chmod(0o444)
