"""One stem of a template, grown beside other work, and grown again when it has ended."""

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from etude.common.errors import UnavailableError
from etude.envserver import metrics
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.machines.lanes import Lanes
from etude.envserver.drivers.machines.levels import Backoff
from etude.envserver.drivers.machines.pace import Work
from etude.envserver.drivers.machines.protocol import Delta
from etude.envserver.drivers.qemu import stem as stems
from etude.envserver.drivers.qemu.stem import Stem
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.drivers.qemu.vm import Vm

log = logging.getLogger(__name__)


class StemKeeper:
    """What splits machines off, as long as there is anything to split."""

    def __init__(
        self,
        base: Template,
        *,
        library: Callable[[], Path | None],
        folder: Path,
        jail: Jail,
        lanes: Lanes,
        saved: Delta | None = None,
    ) -> None:
        """Nothing is grown before the first call of tend().

        Args:
            base: whose clone the stem is.
            library: what makes it one that can be split; None where there is none. May block.
            folder: what the folders of its stems are called; each has another ending.
            jail: whom stem and parts run as.
            lanes: the pace of the node.
            saved: the state that the stem takes up; unset is the template's. It stays the caller's.
        """
        self._base, self._library, self._folder, self._saved = base, library, folder, saved
        self._jail, self._lanes = jail, lanes
        self._stem: Stem | None = None
        self._backoff = Backoff()
        self._growing: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a machine can be split off now."""
        return self._stem is not None and self._stem.is_alive

    @property
    def address(self) -> str:
        """Of the template."""
        return self._base.address

    def tend(self) -> "asyncio.Task[None] | None":
        """Grow a stem if there is none and none is on its way; answers what does, if anything."""
        is_busy = self._growing is not None and not self._growing.done()
        if not self.is_ready and not is_busy and time.monotonic() >= self._backoff.until_s:
            name = f"grow a stem of {self._base.address[:12]}"
            self._growing = asyncio.create_task(self._grow(), name=name)
            return self._growing
        return None

    async def split(self, folder: Path) -> Vm | None:
        """A stopped machine in an empty folder of its own; None where none can be split off.

        The folder stays, and is empty, if there is none.

        Raises:
            VmmError: the stem failed and cannot be ended, so that the folder is of no use.
        """
        stem = self._stem
        if stem is None or not stem.is_alive:
            if self._saved is None:  # else whose files those are may have closed them
                self.tend()
            return None
        try:
            found = await stem.split(folder)
        except VmmError as error:
            if self._stem is stem:
                self._stem = None
            await self._failed(error, stem)
            if not stem.vm.exited.done():
                # It may fork yet, and its child would take this folder for its own.
                raise
            _emptied(folder)
            return None
        self._lanes.watch(found)
        return found

    async def distrust(self, error: Exception) -> None:
        """End the stem: what was split off of it did not answer."""
        stem, self._stem = self._stem, None
        if stem is not None:  # else its other parts have told
            await self._failed(error, stem)

    async def close(self) -> None:
        """End the stem; what was split off goes on."""
        if self._growing is not None and not self._growing.done():
            self._growing.cancel()
            await asyncio.wait([self._growing])
        stem, self._stem = self._stem, None
        if stem is not None:
            await stem.destroy()

    async def _grow(self) -> None:
        try:
            library = await asyncio.to_thread(self._library)
            if library is None:
                self._backoff = Backoff(until_s=float("inf"))
                return
            async with self._lanes.turn(Work.RESTORE, is_urgent=self._saved is not None):
                # One before it may be on its way out of its own.
                folder = self._folder.with_name(f"{self._folder.name}-{secrets.token_hex(4)}")
                _emptied(folder)
                self._stem = await stems.grown(
                    self._base, library, folder=folder, jail=self._jail, saved=self._saved
                )
                self._lanes.watch(self._stem.vm)
        except (UnavailableError, OSError) as error:
            await self._failed(error, None)
        else:
            self._backoff = Backoff()

    async def _failed(self, error: Exception, stem: Stem | None) -> None:
        self._backoff = self._backoff.failed(now_s=time.monotonic())
        metrics.stem_failures.inc()
        log.warning("machines are started one by one for a while: %s", error)
        if stem is not None:
            with contextlib.suppress(OSError):
                await stem.destroy()


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
