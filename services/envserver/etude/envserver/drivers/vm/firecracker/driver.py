"""Firecracker driver: the processor runs the guests, so the level is STRONG."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from etude.common.errors import CorruptError
from etude.envserver.drivers.base import IsolationStrength
from etude.envserver.drivers.vm.driver import VmDriver
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import (
    jail,
    memory_files,
    template,
    vmm_processes,
)
from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig
from etude.envserver.drivers.vm.firecracker.compatibility import compat_key
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerPrograms
from etude.envserver.drivers.vm.firecracker.template import FirecrackerTemplate
from etude.envserver.drivers.vm.firecracker.template_cache import FirecrackerTemplateCache
from etude.envserver.drivers.vm.firecracker.vm import HostContext
from etude.envserver.drivers.vm.firecracker.vmlinux import vmlinux
from etude.envserver.drivers.vm.firecracker.vmm_processes import FirecrackerFolders
from etude.envserver.drivers.vm.prewarm import prewarm_template
from etude.envserver.drivers.vm.start.cpu_budget import StartWork
from etude.envserver.drivers.vm.uid_pool import empty_network
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.images.built_image import BuiltImage


@dataclass(slots=True, kw_only=True)
class FirecrackerDriver(VmDriver):
    """Its templates are files, hard-linked into the jail of each clone."""

    machine: FirecrackerConfig
    programs: FirecrackerPrograms
    name: str = "firecracker"
    strength: IsolationStrength = IsolationStrength.STRONG
    _context: HostContext | None = None

    @override
    def vm_folders(self) -> FirecrackerFolders:
        return FirecrackerFolders(scratch=self.scratch)

    @override
    async def load_template(self, image: BuiltImage) -> FirecrackerTemplate:
        try:
            return await self._template(image)
        except (VmmError, GuestLostError, CorruptError, OSError) as error:
            raise self._boot_error(image, error) from error

    @override
    async def stop(self) -> None:
        await VmDriver.stop(self)
        if self._context is not None:
            os.close(self._context.netns)
            self._context = None

    async def _template(self, image: BuiltImage) -> FirecrackerTemplate:
        kept = FirecrackerTemplateCache(folder=self._registry.templates, key=self._registry.key)
        ground = self._host_context()
        key = await asyncio.to_thread(compat_key, self.programs.firecracker, self.machine, image)
        address = await asyncio.to_thread(kept.find, key)
        if address is None:
            await self._boot(image, kept, key, ground)
            address = await asyncio.to_thread(kept.find, key)
        if address is None:
            raise VmmError("the cached files are not what was written")
        return FirecrackerTemplate(
            address=address,
            compat_key=key,
            machine=self.machine,
            folder=kept.folder_of(key),
            context=ground,
            uids=self.uids,
        )

    async def _boot(
        self,
        image: BuiltImage,
        kept: FirecrackerTemplateCache,
        key: str,
        ground: HostContext,
    ) -> None:
        folder = self._boot_folder()
        kernel = folder.with_name(f"{folder.name}.vmlinux")
        try:
            await asyncio.to_thread(_unpack, image, kernel)
            async with self.scheduler.acquire_start(StartWork.BOOT):
                running = await template.start_vmm(self.machine, ground, self.uids, folder=folder)
                with kept.add(key) as target:
                    await template.boot_template(
                        image, kernel, running, target=target, warm_up=prewarm_template
                    )
        finally:
            kernel.unlink(missing_ok=True)

    def _host_context(self) -> HostContext:
        if self._context is None:
            if not memory_files.has_small_holes(self.scratch):
                raise VmmError(f"{self.scratch}: its file system has blocks larger than a page")
            mine = vmm_processes.vm_id_prefix(self.scratch)
            jail.remove_cgroups(self.programs.firecracker.name, mine)
            self._context = HostContext(programs=self.programs, prefix=mine, netns=empty_network())
        return self._context


def _unpack(image: BuiltImage, target: Path) -> None:
    target.write_bytes(vmlinux(image.kernel.read_bytes()))
    target.chmod(0o444)
