"""Sandboxes as microVMs: clones of one template, each in a jail of its own.

STRONG where the processor runs the guest (KVM). Where QEMU translates its instructions (TCG), QEMU
claims no wall, the jail is one, and the level is WEAK: one tenant, trusted templates.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace import PathFault, WorkspaceError
from etude.agent.workspace.protocol import HOME, Runner
from etude.envserver import folders
from etude.envserver.drivers.base import (
    GRADE_OUTPUT_BYTES,
    Driver,
    DriverUnavailableError,
    Outcome,
    Sandbox,
    Strength,
    Verification,
)
from etude.envserver.drivers.qemu import guests
from etude.envserver.drivers.qemu.errors import VmmError
from etude.envserver.drivers.qemu.guests import Guest
from etude.envserver.drivers.qemu.jail import Jail
from etude.envserver.drivers.qemu.machine import Accelerator, Machine
from etude.envserver.drivers.qemu.placing import place
from etude.envserver.drivers.qemu.sandbox import MACHINE, VmSandbox, outcome
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.drivers.sandbox import layout
from etude.envserver.drivers.sandbox.layout import LOGS, TESTS
from etude.envserver.guest.channel import GuestChannel, GuestLostError
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.images.build import Image

_WARM_UP = (
    f"mkdir -p {TESTS} {LOGS} && chown {layout.INSIDE_UID}:{layout.INSIDE_UID} {HOME} {LOGS}"
    " && sync; command -v python3 && python3 -c pass; command -v git && git --version; true"
)
"""Folders that every environment has, and what the first command of a clone would wait for."""
_WARM_UP_LIMIT_S = 120.0

_numbers = itertools.count()


@dataclass(slots=True)
class QemuDriver(Driver):
    """One sealed template for each image of the pool's templates."""

    scratch: Path
    """Private folder of the node."""
    images: Mapping[str, Image]
    """What each template of the pool boots, by the template's name."""
    machine: Machine
    jail: Jail = field(default_factory=Jail)
    name: str = "qemu-microvm"
    leases: Path = field(init=False)
    strength: Strength = field(init=False)
    _templates: dict[str, Template] = field(default_factory=dict)
    """By the image's address."""

    def __post_init__(self) -> None:
        self.leases = self.scratch / "leases"
        is_kvm = self.machine.accelerator is Accelerator.KVM
        self.strength = Strength.STRONG if is_kvm else Strength.WEAK

    @override
    async def start(self) -> None:
        self.leases.mkdir(parents=True, exist_ok=True)
        for image in self.images.values():
            if image.address not in self._templates:
                self._templates[image.address] = await self._booted(image)

    @override
    async def stop(self) -> None:
        while self._templates:
            self._templates.popitem()[1].close()

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        return VmSandbox(folder, runner, partial(self._launch, template, folder.name))

    @override
    async def verify(self, work: Verification) -> Outcome:
        # No state file in it: a successor sweeps what a dead node left here.
        folder = self.leases / f"grade-{next(_numbers)}"
        folder.mkdir()
        try:
            (folder / MACHINE).mkdir(mode=0o700)
            guest = await self._launch(work.template, folder.name, folder / MACHINE)
            try:
                return await _verified(guest.channel, work)
            finally:
                await guest.destroy()
        finally:
            folders.remove(folder)

    @override
    def is_repeatable(self, command: str) -> bool:
        return layout.warm(command) is not None

    async def _launch(self, template: str, name: str, folder: Path) -> Guest:
        image = self.images.get(template)
        base = self._templates.get(image.address) if image is not None else None
        if base is None:
            raise VmmError(f"template {template!r} was not booted")
        return await guests.launched(base, name=name, folder=folder, jail=self.jail)

    async def _booted(self, image: Image) -> Template:
        folder = self.scratch / f"boot-{next(_numbers)}"
        folder.mkdir(mode=0o700)
        try:
            return await guests.booted(
                image, self.machine, folder=folder, jail=self.jail, warm_up=_warm_up
            )
        except (VmmError, GuestLostError) as error:
            raise DriverUnavailableError(
                f"image {image.name} does not boot: {error}",
                where=f"driver {self.name}",
                fix="look at the console's last words, build the image again",
            ) from error


async def _warm_up(channel: GuestChannel) -> None:
    await GuestCommands(channel=channel, uid=0).run(_WARM_UP, _WARM_UP_LIMIT_S)


async def _verified(channel: GuestChannel, work: Verification) -> Outcome:
    await place(channel, work.workspace, root=HOME)
    await place(channel, work.tests, root=TESTS)
    commands = GuestCommands(channel=channel, head_bytes=0, tail_bytes=GRADE_OUTPUT_BYTES)
    done = await commands.run(work.command, work.timeout_s)
    logs = GuestWorkspace(channel, commands.run, cwd=LOGS)
    return outcome(done, await _collected(logs, work.reward_path))


async def _collected(logs: GuestWorkspace, path: str) -> bytes | None:
    """A regular, small file below /logs; None where there is none.

    Raises:
        WorkspaceError: the guest could not read for a reason that is not the file's.
    """
    try:
        data = await logs.read(path.removeprefix(f"{LOGS}/"))
    except WorkspaceError as error:
        if error.fault in {PathFault.NO_SPACE, PathFault.TOO_SLOW}:
            raise
        return None
    return data if len(data) <= layout.MAX_COLLECTED_BYTES else None
