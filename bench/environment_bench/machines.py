"""Machines of one template without a node around them, for what only the driver does."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from environment_bench.density import used_ms
from etude.envserver.drivers.vm import guest_vm, host_cpu
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import boot
from etude.envserver.drivers.vm.qemu import template as templates
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.images import built_image

WARM_UP_LIMIT_S = 120


@dataclass(slots=True)
class Machines:
    """A template and its clones."""

    template: QemuTemplate
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    async def of(cls, folder: Path, image: Path) -> Self:
        """Boot the image once."""
        (folder / "boot").mkdir()
        template = await boot.boot_template(
            built_image.read_image(image),
            QemuConfig(tsc_khz=host_cpu.host_tsc_khz()),
            folder=folder / "boot",
            jail=Jail(),
            warm_up=_warm_up,
        )
        return cls(template, folder)

    async def paused(self) -> GuestVm:
        """A clone that stands still and is nobody's."""
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        shell = await templates.spawn_shell(self.template, folder=folder, jail=Jail())
        return await guest_vm.start_paused_clone(shell, self.template)

    async def handed_out(self, waiting: GuestVm) -> GuestVm:
        """The same as an environment that has answered.

        Raises:
            RuntimeError: it does not answer.
        """
        found = await guest_vm.resume_paused_clone(waiting, name=f"env-{next(self._numbers)}")
        if not await found.channel.ping(timeout_s=60):
            raise RuntimeError("a clone does not answer")
        return found

    def cpu_ms(self, guests: Sequence[GuestVm]) -> float:
        """CPU time of this process and of some machines."""
        return 1000 * time.process_time() + sum(used_ms(each.vm.pid) for each in guests)

    async def close(self) -> None:
        """Give the template back; clones are their owner's."""
        self.template.close()


async def _warm_up(channel: GuestChannel) -> None:
    await GuestCommands(channel=channel, uid=0).run("true", WARM_UP_LIMIT_S)
