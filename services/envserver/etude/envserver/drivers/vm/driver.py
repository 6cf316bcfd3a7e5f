"""Base of the microVM drivers: VMs cloned from a template, each in a jail of its own."""

import itertools
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace.interface import Runner
from etude.envserver.drivers import guest_grading
from etude.envserver.drivers.base import (
    Begun,
    Caps,
    Driver,
    DriverUnavailableError,
    Outcome,
    Readiness,
    Sandbox,
    SandboxError,
    Start,
    Verification,
    Warmth,
)
from etude.envserver.drivers.vm.delta_file import Proven
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import Guest
from etude.envserver.drivers.vm.interface import Base
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.registry import Estate
from etude.envserver.drivers.vm.sandbox import VmSandbox
from etude.envserver.drivers.vm.start import start_scheduler
from etude.envserver.drivers.vm.start import starter as start_starter
from etude.envserver.drivers.vm.start.quarantine import Quarantine
from etude.envserver.drivers.vm.start.start_scheduler import Lanes
from etude.envserver.drivers.vm.start.starter import Started, Starter
from etude.envserver.drivers.vm.start.warm_pool import Stock
from etude.envserver.drivers.vm.suspend.idle_policy import Patience
from etude.envserver.drivers.vm.suspend.lease_vm import TOUCHED_BYTES, Bed, Home, asleep
from etude.envserver.drivers.vm.vmm_processes import MACHINE, Places
from etude.envserver.egress.environment_egress import PoolEgress
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage import folders

STOCK = "stock"
"""Name of the warm pools' folder, next to that of the leases."""

CAPS = Caps(files=True, memory=True, freeze=True, egress=True)

_numbers = itertools.count()
_MAX_TOLD = 2_000


@dataclass(slots=True, kw_only=True)
class MachineDriver(Driver):
    """Boots one VM template for each image of the pool; subclasses know how."""

    scratch: Path
    """Private folder of the host."""
    images: Mapping[str, BuiltImage]
    """Image of each pool template, by the template's name."""
    jail: Jail = field(default_factory=Jail)
    egress: PoolEgress | None = None
    """Egress policy; None denies everything."""
    caps: Caps = CAPS
    begins: Start | None = None
    leases: Path = field(init=False)
    lanes: Lanes = field(
        default_factory=lambda: Lanes(
            cores=start_scheduler.host_cores(), room=start_scheduler.host_room()
        )
    )
    """Limits concurrent VM starts and running VMs."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Circuit breaker for templates that crash at start."""
    patience: Patience = field(default_factory=Patience)
    """Idle times after which a VM is frozen and suspended."""
    _buffer: PageBuffer = field(default_factory=lambda: PageBuffer(TOUCHED_BYTES))
    _proven: Proven = field(default_factory=Proven)
    _starters: dict[str, Starter] = field(default_factory=dict)
    """By the image's address."""
    _estate: Estate = field(init=False)

    def __post_init__(self) -> None:
        self._estate = Estate(self.scratch, self.places())
        self.leases = self.scratch / "leases"

    @abstractmethod
    async def base(self, image: BuiltImage) -> Base:
        """Load the cached template of an image, or boot and cache it.

        Raises:
            DriverUnavailableError: the image does not boot.
        """

    def places(self) -> Places:
        """Layout and process discovery of this host's VMs."""
        return Places(scratch=self.scratch)

    @override
    async def start(self) -> None:
        await self._estate.open()
        for image in self.images.values():
            if image.address not in self._starters:
                self._starters[image.address] = self._starter(await self.base(image))
        for machine in await self._estate.adopt(each.base for each in self._starters.values()):
            self.lanes.watch(machine)

    @override
    async def stop(self) -> None:
        while self._starters:
            _, starter = self._starters.popitem()
            await starter.stock.close()
            starter.base.close()
        await self._estate.close()

    @override
    def readiness(self) -> Readiness:
        return Readiness(
            templates=[self._warmth(name) for name in self.images],
            # 0 means no limit, so exhausted memory is reported as 1 byte.
            free_memory_bytes=max(1, self.lanes.free_bytes),
            queue_ms=self.lanes.queue_ms,
        )

    @override
    def keep_warm(self, wanted: Sequence[Warmth], *, max_shells: int) -> None:
        for starter, target in start_starter.targets(self._of, self.images, wanted, max_shells):
            starter.stock.set_target(target)

    @override
    def check(self, template: str) -> None:
        self.quarantine.check(template)

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        home = Home(
            lease=folder,
            start=partial(self._launch, template, folder.name),
            starter=partial(self._of, template),
            bed=self._bed,
            places=self.lanes.places,
            patience=self.patience,
            gate=self.egress.for_environment(template, folder.name)
            if self.egress is not None
            else None,
        )
        return VmSandbox(folder, runner, home, home.find(self._found(folder)))

    @override
    async def verify(self, work: Verification) -> Outcome:
        # Without a state file, so that a successor sweeps what a dead host left here.
        folder = self.leases / f"grade-{next(_numbers)}"
        folder.mkdir()
        try:
            (folder / MACHINE).mkdir(mode=0o700)
            asked_s = time.monotonic()
            await self.lanes.places.take()
            try:
                guest, start = await self._launch(work.template, folder.name, folder / MACHINE)
                begun = Begun(start, time.monotonic() - asked_s)
                try:
                    outcome = await guest_grading.fresh(guest.channel, work)
                    return replace(outcome, begun=begun)
                finally:
                    await guest.destroy()
            finally:
                self.lanes.places.give()
        finally:
            folders.remove_folder(folder)

    @override
    def has_services(self, template: str) -> bool:
        image = self.images.get(template)
        return image is not None and image.has_services

    @override
    def is_repeatable(self, command: str) -> bool:
        # A result that depends on other hosts is not decided by the files.
        return self.egress is None and sandbox_layout.warm(command) is not None

    def _found(self, lease: Path) -> Guest | None:
        try:
            return self._estate.take(lease)
        except SandboxError:
            if asleep(lease) is None:
                raise
            # The suspended state on disk is as of the last call.
            folders.remove_folder(lease / MACHINE)
            return None

    def _warmth(self, template: str) -> Warmth:
        return start_starter.warmth(template, self._of(template), self.quarantine.why(template))

    @property
    def _bed(self) -> Bed:
        return Bed(key=self._estate.key, buffer=self._buffer, proven=self._proven)

    async def _launch(self, template: str, name: str, folder: Path) -> Started:
        starter = self._of(template)
        with self.quarantine.start(template):
            return await starter.start(name, folder)

    def _of(self, template: str) -> Starter:
        image = self.images.get(template)
        found = self._starters.get(image.address) if image is not None else None
        if found is None:
            raise VmmError(f"template {template!r} was not booted")
        return found

    def _starter(self, base: Base) -> Starter:
        stock = Stock(base, folder=self.scratch / STOCK, jail=self.jail, lanes=self.lanes)
        return Starter(base=base, jail=self.jail, lanes=self.lanes, stock=stock)

    def _boot_folder(self) -> Path:
        """Create an empty folder for a VM that becomes a template."""
        folder = self.scratch / f"boot-{next(_numbers)}"
        folder.mkdir(mode=0o700)
        return folder

    def _unbootable(self, image: BuiltImage, error: Exception) -> DriverUnavailableError:
        # The notes hold the end of the console, where the VM has one.
        notes = "\n".join(getattr(error, "__notes__", ())).strip()
        said = f"; its console ends with: {notes[-_MAX_TOLD:]}" if notes else ""
        return DriverUnavailableError(
            f"image {image.name} does not boot: {error}{said}",
            where=f"driver {self.name}",
            fix="build the image again (etude images build)",
        )
