"""Base of the microVM drivers: VMs cloned from a template, each in a jail of its own."""

import asyncio
import itertools
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace.interface import Runner
from etude.common.api.pool.network import Network
from etude.common.pinned_images import pool_template
from etude.envserver.drivers import guest_grading, scratch_folder
from etude.envserver.drivers.base import (
    CommandOutcome,
    Driver,
    DriverCapabilities,
    DriverReadiness,
    DriverUnavailableError,
    ImageSize,
    Sandbox,
    SandboxError,
    SandboxStart,
    StartKind,
    TemplateReadiness,
    Verification,
)
from etude.envserver.drivers.egress_rules import RuleNames
from etude.envserver.drivers.vm import task_templates
from etude.envserver.drivers.vm.delta_file import VerifiedFiles
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.interface import Vmm, VmTemplate
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.registry import VmRegistry
from etude.envserver.drivers.vm.sandbox import VmSandbox
from etude.envserver.drivers.vm.start import start_scheduler
from etude.envserver.drivers.vm.start.quarantine import StartQuarantine
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.starter import StartedVm, VmStarter, pool_targets
from etude.envserver.drivers.vm.start.warm_pool import WarmPool
from etude.envserver.drivers.vm.suspend.idle_policy import IdleTimeouts
from etude.envserver.drivers.vm.suspend.lease_vm import (
    BUFFER_BYTES,
    SuspendStore,
    VmContext,
    suspended_file,
)
from etude.envserver.drivers.vm.uid_pool import UidPool
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER, VmFolders
from etude.envserver.egress.environment_egress import PoolEgress
from etude.envserver.guest.commands import CommandSettings, guest_limits
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.pull.bounded_program import FillLimits, measure_folder
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage import folders
from etude.v1 import guest_pb2

WARM_POOL = "stock"
"""Name of the warm pools' folder, next to that of the leases."""

CAPS = DriverCapabilities(files=True, memory=True, freeze=True, egress=True)

_numbers = itertools.count()
_MAX_TOLD = 2_000


@dataclass(slots=True, kw_only=True)
class VmDriver(Driver):
    """Boots one VM template for each image of the pool; subclasses know how."""

    scratch: Path
    images: Mapping[str, BuiltImage]
    """Image of each pool template, by the template's name."""
    jail: Jail = field(default_factory=Jail)
    uids: UidPool = field(default_factory=UidPool)
    """User ids of its VMs, one for each."""
    egress: PoolEgress | None = None
    """Egress policy; None denies everything."""
    limits: guest_pb2.GuestLimits = field(default_factory=guest_limits)
    """Limits of each command."""
    caps: DriverCapabilities = CAPS
    start_kind: StartKind | None = None
    leases: Path = field(init=False)
    scheduler: StartScheduler = field(
        default_factory=lambda: StartScheduler(
            cores=start_scheduler.host_cores(), room=start_scheduler.host_room()
        )
    )
    """Limits concurrent VM starts and running VMs."""
    quarantine: StartQuarantine = field(default_factory=StartQuarantine)
    """Circuit breaker for templates that crash at start."""
    idle_timeouts: IdleTimeouts = field(default_factory=IdleTimeouts)
    """Idle times after which a VM is frozen and suspended."""
    _buffer: PageBuffer = field(default_factory=lambda: PageBuffer(BUFFER_BYTES))
    _verified: VerifiedFiles = field(default_factory=VerifiedFiles)
    _starters: dict[str, VmStarter] = field(default_factory=dict)
    """By the image's address."""
    _task_images: dict[str, BuiltImage] = field(default_factory=dict)
    """Images of tasks, by the driver's name of their template."""
    _pool_keys: frozenset[str] = frozenset()
    """Compatibility keys of the pool's own templates."""
    _registry: VmRegistry = field(init=False)

    def __post_init__(self) -> None:
        self._registry = VmRegistry(self.scratch, self.vm_folders())
        self.leases = self.scratch / "leases"

    @abstractmethod
    async def load_template(self, image: BuiltImage) -> VmTemplate:
        """Load the cached template of an image, or boot and cache it.

        Raises:
            DriverUnavailableError: the image does not boot.
        """

    def vm_folders(self) -> VmFolders:
        """Layout and process discovery of this host's VMs."""
        return VmFolders(scratch=self.scratch)

    @override
    async def start(self) -> None:
        await self._registry.open()
        self.uids.reserve(self._registry.uids)
        for image in self.images.values():
            if image.address not in self._starters:
                self._starters[image.address] = self._make_starter(await self.load_template(image))
        templates = [starter.template for starter in self._starters.values()]
        self._pool_keys = frozenset(template.compat_key for template in templates)
        await asyncio.to_thread(
            task_templates.prune_templates, self._registry.templates, self._pool_keys
        )
        await self._adopt(templates)

    @override
    async def stop(self) -> None:
        while self._starters:
            _, starter = self._starters.popitem()
            await self._close_starter(starter)
        await self._registry.close()

    @override
    def readiness(self) -> DriverReadiness:
        return DriverReadiness(
            templates=[self._template_readiness(name) for name in self.images],
            # 0 means no limit, so exhausted memory is reported as 1 byte.
            free_memory_bytes=max(1, self.scheduler.free_bytes),
            queue_ms=self.scheduler.queue_ms,
        )

    @override
    def keep_warm(self, wanted: Sequence[TemplateReadiness], *, max_shells: int) -> None:
        for starter, target in pool_targets(self._starter_of, self.images, wanted, max_shells):
            starter.warm_pool.set_target(target)

    @override
    def check_startable(self, template: str) -> None:
        self.quarantine.check(template)

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        egress, pool_name = self.egress, pool_template(template)
        context = VmContext(
            lease=folder,
            start=partial(self._launch, template, folder.name),
            starter=partial(self._starter_of, template),
            suspend_store=self._suspend_store,
            run_slots=self.scheduler.run_slots,
            idle_timeouts=self.idle_timeouts,
            limits=self.limits,
            gate=egress.for_environment(pool_name, folder.name) if egress is not None else None,
            image_environment=self._image_environment(template),
        )
        return VmSandbox(folder, runner, context, context.find(self._find_guest(folder)))

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        async with scratch_folder.grading_folder(self.leases) as folder:
            (folder / VM_FOLDER).mkdir(mode=0o700)
            asked_s = time.monotonic()
            await self.scheduler.run_slots.take()
            try:
                guest, kind = await self._launch(work.template, folder.name, folder / VM_FOLDER)
                start = SandboxStart(kind, time.monotonic() - asked_s)
                return await guest_grading.grade_new(
                    guest.channel,
                    work,
                    CommandSettings(
                        sandbox_layout.command_environment(self._image_environment(work.template)),
                        self.limits,
                    ),
                    start=start,
                    destroy=guest.destroy,
                )
            finally:
                self.scheduler.run_slots.give()

    @override
    def has_services(self, template: str) -> bool:
        image = self.images.get(template)
        return image is not None and image.has_services

    @override
    def template_image(self, template: str) -> BuiltImage:
        return self.images[template]

    @override
    async def add_image(self, name: str, image: BuiltImage) -> ImageSize:
        starter = self._starters.get(image.address)
        if starter is None:
            template = await self.load_template(image)
            starter = self._starters[image.address] = self._make_starter(template)
            await self._adopt([template])
        self._task_images[name] = image
        folder = self._registry.templates / starter.template.compat_key
        await asyncio.to_thread(task_templates.mark_template, folder, image.address)
        disk = await asyncio.to_thread(measure_folder, folder, FillLimits())
        return ImageSize(disk.num_bytes, starter.template.memory_bytes)

    @override
    async def rest_image(self, address: str) -> None:
        starter = self._starters.pop(address, None)
        if starter is not None:
            await self._close_starter(starter)

    @override
    async def remove_image(self, address: str) -> None:
        names = [name for name, image in self._task_images.items() if image.address == address]
        for name in names:
            del self._task_images[name]
        await self.rest_image(address)
        await asyncio.to_thread(
            task_templates.remove_image, self._registry.templates, address, self._pool_keys
        )

    @override
    def left_image_sizes(self, known: Collection[str]) -> Mapping[str, int]:
        sizes = task_templates.image_sizes(self._registry.templates)
        return {address: size for address, size in sizes.items() if address not in known}

    async def _adopt(self, templates: Sequence[VmTemplate]) -> list[Vmm]:
        """Adopt the VMs of some templates that an earlier process left."""
        adopted = await self._registry.adopt(templates)
        for vmm in adopted:
            self.scheduler.watch(vmm)
        return adopted

    async def _close_starter(self, starter: VmStarter) -> None:
        await starter.warm_pool.close()
        starter.template.close()

    @override
    def replace_network(self, network: Network, rules: RuleNames) -> int:
        return 0 if self.egress is None else self.egress.replace(network, rules)

    def _image_environment(self, template: str) -> Mapping[str, str]:
        image = self.images.get(template) or self._task_images.get(template)
        return {} if image is None else image.environment

    def _find_guest(self, lease: Path) -> GuestVm | None:
        try:
            return self._registry.claim(lease)
        except SandboxError:
            if suspended_file(lease) is None:
                raise
            # The suspended state on disk is as of the last call.
            folders.remove_folder(lease / VM_FOLDER)
            return None

    def _template_readiness(self, template: str) -> TemplateReadiness:
        return self._starter_of(template).readiness(template, self.quarantine.why(template))

    @property
    def _suspend_store(self) -> SuspendStore:
        return SuspendStore(key=self._registry.key, buffer=self._buffer, verified=self._verified)

    async def _launch(self, template: str, name: str, folder: Path) -> StartedVm:
        starter = self._starter_of(template)
        with self.quarantine.start(template):
            return await starter.start(name, folder)

    def _starter_of(self, template: str) -> VmStarter:
        image = self.images.get(template) or self._task_images.get(template)
        found = self._starters.get(image.address) if image is not None else None
        if found is None:
            raise VmmError(f"template {template!r} was not booted")
        return found

    def _make_starter(self, template: VmTemplate) -> VmStarter:
        folder = self.scratch / WARM_POOL
        pool = WarmPool(template, folder=folder, jail=self.jail, scheduler=self.scheduler)
        return VmStarter(
            template=template, jail=self.jail, scheduler=self.scheduler, warm_pool=pool
        )

    def _boot_folder(self) -> Path:
        """Create an empty folder for a VM that becomes a template."""
        folder = self.scratch / f"boot-{next(_numbers)}"
        folder.mkdir(mode=0o700)
        return folder

    def _boot_error(self, image: BuiltImage, error: Exception) -> DriverUnavailableError:
        # The notes hold the end of the console, where the VM has one.
        notes = "\n".join(getattr(error, "__notes__", ())).strip()
        said = f"; its console ends with: {notes[-_MAX_TOLD:]}" if notes else ""
        return DriverUnavailableError(
            f"image {image.name} does not boot: {error}{said}",
            where=f"driver {self.name}",
            fix="build the image again (etude images build)",
        )
