"""gVisor driver: containers whose user-space kernel handles their system calls.

Covered: no system call of an environment reaches the machine's kernel; the user-space kernel has no
network, no capability, no file but what a second process hands it, read-only, and a filter on its
own calls. Not covered: bugs that lead through both, CPU caches, neighbours' share of CPU, and
memory: the commands of one environment together may take more than its slot says, running, and with
files in folders of the image that all users may write to, which are an overlay in memory without a
limit; of a task's image it is on the host's disk, without a limit either. So it is MODERATE: for
untrusted templates, where there is no hardware virtualisation.
"""

import asyncio
import functools
import itertools
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace.interface import Runner
from etude.common.errors import CorruptError, UserError
from etude.envserver.drivers import guest_grading, scratch_folder
from etude.envserver.drivers.base import (
    CommandOutcome,
    Driver,
    DriverCapabilities,
    DriverUnavailableError,
    ImageSize,
    IsolationStrength,
    Sandbox,
    SandboxError,
    SandboxStart,
    StartKind,
    Verification,
)
from etude.envserver.drivers.gvisor import isolation_probe, runsc
from etude.envserver.drivers.gvisor.container import GvisorContainer
from etude.envserver.drivers.gvisor.runsc import RunscClient, RunscError
from etude.envserver.drivers.gvisor.sandbox import (
    FOLDER,
    ContainerFactory,
    GvisorSandbox,
    current_container,
)
from etude.envserver.guest.commands import CommandSettings, guest_limits
from etude.envserver.images import host_programs
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.pull.bounded_program import FillLimits, measure_folder
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage import folders
from etude.v1 import guest_pb2

_LIMIT_S = 900.0


_POOL_ROOTS, _TASK_ROOTS = "root", "task-root"
"""Folders of the unpacked roots of the pool's images, and of the tasks'."""


async def unpack_root(image: BuiltImage, scratch: Path, kind: str = _POOL_ROOTS) -> Path:
    """Unpack an image's root, read-only for all.

    Raises:
        UserError: unsquashfs is missing or failed.
    """
    cache = BuildCache(scratch / "roots")
    build = functools.partial(_unsquash, image)
    entry = await asyncio.to_thread(cache.entry, kind, image.address, build)
    return entry / "root"


def prune_roots(scratch: Path, used: set[str]) -> None:
    """Remove the roots of images that no template names any more."""
    for entry in BuildCache(scratch / "roots").entries(_POOL_ROOTS):
        if entry.name not in used:
            shutil.rmtree(entry)


def _unsquash(image: BuiltImage, folder: Path) -> None:
    words = ("unsquashfs", "-no-progress", "-quiet", "-dest", str(folder / "root"), str(image.root))
    host_programs.run_program(words, what="root", cwd=folder, timeout_s=_LIMIT_S)
    for name in ("tests", "logs", "var/tmp"):
        (folder / "root" / name).mkdir(parents=True, exist_ok=True)
    # Whatever the umask is; the folders above it belong to root alone.
    (folder / "root").chmod(0o755)


log = logging.getLogger(__name__)

_CAPS = DriverCapabilities(files=True, memory=True, freeze=False)
_numbers = itertools.count()
SWEEP_S = 30.0
"""A killed process may be starting a container, which its successor cannot list yet."""


@dataclass(slots=True)
class GvisorDriver(Driver):
    """One unpacked root for each image of the pool's templates."""

    scratch: Path
    images: Mapping[str, BuiltImage]
    """Image of each pool template, by the template's name."""
    memory_mib: int
    """Size limit of one environment's workspace."""
    limits: guest_pb2.GuestLimits = field(default_factory=guest_limits)
    """Limits of each command."""
    name: str = "gvisor"
    strength: IsolationStrength = IsolationStrength.MODERATE
    caps: DriverCapabilities = _CAPS
    start_kind: StartKind | None = None
    leases: Path = field(init=False)
    _runsc: RunscClient = field(init=False)
    _roots: dict[str, Path] = field(default_factory=dict)
    """Unpacked roots, by the template's name."""
    _task_images: dict[str, BuiltImage] = field(default_factory=dict)
    """Images of tasks, by the driver's name of their template."""
    _slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(2 * (os.cpu_count() or 1))
    )
    _lock: int = -1
    _sweeper: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.leases = self.scratch / "leases"
        self._runsc = RunscClient(state=self.scratch / "runsc")

    @override
    async def start(self) -> None:
        if self._lock >= 0:
            return
        self.leases.mkdir(parents=True, exist_ok=True)
        self._lock = await scratch_folder.lock_scratch(self.scratch)
        try:
            await self._end_orphans()
            for name, image in self.images.items():
                self._roots[name] = await unpack_root(image, self.scratch)
            used = {image.address for image in self.images.values()}
            await asyncio.to_thread(prune_roots, self.scratch, used)
            await self._try_out()
            self._sweeper = asyncio.create_task(self._keep_sweeping(), name="sweep containers")
        except (SandboxError, UserError, OSError) as error:
            await self.stop()
            raise DriverUnavailableError(
                f"gVisor does not run here: {error}", where=f"driver {self.name}", fix=runsc.FIX
            ) from error

    @override
    async def stop(self) -> None:
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None and not sweeper.done():
            sweeper.cancel()
            await asyncio.wait([sweeper])
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        begin = partial(self._begin, template)
        factory = ContainerFactory(
            runsc=self._runsc,
            begin=begin,
            slots=self._slots,
            image_environment=self._image_environment(template),
            limits=self.limits,
        )
        return GvisorSandbox(folder, runner, factory)

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        async with scratch_folder.grading_folder(self.leases) as folder:
            asked_s = time.monotonic()
            container = await self._begin(work.template, folder)
            start = SandboxStart(StartKind.SPAWN, time.monotonic() - asked_s)
            return await guest_grading.grade_new(
                container,
                work,
                CommandSettings(
                    sandbox_layout.command_environment(self._image_environment(work.template)),
                    self.limits,
                ),
                start=start,
                destroy=container.destroy,
            )

    @override
    def template_image(self, template: str) -> BuiltImage:
        return self.images[template]

    @override
    async def add_image(self, name: str, image: BuiltImage) -> ImageSize:
        root = self._roots[name] = await unpack_root(image, self.scratch, _TASK_ROOTS)
        self._task_images[name] = image
        return ImageSize((await asyncio.to_thread(measure_folder, root, FillLimits())).num_bytes)

    @override
    async def remove_image(self, address: str) -> None:
        roots = BuildCache(self.scratch / "roots")
        gone = roots.root / _TASK_ROOTS / address / "root"
        for name in [name for name, root in self._roots.items() if root == gone]:
            del self._roots[name], self._task_images[name]
        await asyncio.to_thread(roots.remove, _TASK_ROOTS, address)

    @override
    def left_image_sizes(self, known: Collection[str]) -> Mapping[str, int]:
        entries = BuildCache(self.scratch / "roots").entries(_TASK_ROOTS)
        left = [each for each in entries if each.name not in known]
        return {each.name: measure_folder(each, FillLimits()).num_bytes for each in left}

    def _has_workspace(self, template: str) -> bool:
        image = self._task_images.get(template)
        return image is not None and image.base is not None

    def _image_environment(self, template: str) -> Mapping[str, str]:
        image = self.images.get(template) or self._task_images.get(template)
        return {} if image is None else image.environment

    async def _begin(self, template: str, folder: Path) -> GvisorContainer:
        root = self._roots.get(template)
        if root is None:
            raise RunscError(f"template {template!r} was not unpacked")
        async with self._slots:
            return await GvisorContainer.start(
                self._runsc,
                folder,
                root,
                memory_mib=self.memory_mib,
                has_workspace=self._has_workspace(template),
            )

    async def _try_out(self) -> None:
        """Start a container of the first image, and probe from inside what it is isolated from."""
        folder = self.scratch / f"try-{next(_numbers)}"
        folders.remove_folder(folder)
        folder.mkdir(mode=0o700)
        hidden = folder / "hidden"
        hidden.touch()
        try:
            container = await self._begin(next(iter(self._roots)), folder)
            try:
                await isolation_probe.probe_isolation(
                    container, hidden=hidden, kernel=isolation_probe.host_kernel()
                )
            finally:
                await container.destroy()
        finally:
            await asyncio.to_thread(folders.remove_folder, folder)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._end_orphans()
            except (SandboxError, CorruptError, OSError):
                log.exception("orphaned containers stay until the next sweep")

    async def _end_orphans(self) -> None:
        """End containers that neither a lease nor this process knows."""
        listed = await self._runsc.containers()
        # Listed afterwards: containers made since are not in the first list.
        known = await asyncio.to_thread(self._of_leases) | self._runsc.live
        orphans = [name for name in listed if name not in known]
        for name in orphans:
            await self._runsc.end(name)
        if orphans:
            log.warning("ended %d orphaned containers", len(orphans))

    def _of_leases(self) -> set[str]:
        """List recorded containers of leases, from this process or an earlier one."""
        known = set[str]()
        for lease in self.leases.iterdir():
            if name := current_container(lease):
                found = GvisorContainer.load(self._runsc, lease / FOLDER / name)
                known |= {found.name} if found is not None else set()
        return known
