"""Supervisor of one fork server: starts it in the background, and again when it has ended."""

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from etude.common.errors import UnavailableError
from etude.envserver import metrics
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.fork_server.fork_server import ForkServer, start_fork_server
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.vm import QemuVm
from etude.envserver.drivers.vm.start.cpu_budget import StartWork
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.starter import ChildSpawner
from etude.envserver.drivers.vm.start.warm_pool_levels import RefillBackoff

log = logging.getLogger(__name__)


class ForkServerSupervisor(ChildSpawner):
    """Supervises one fork server and spawns child VMs of it."""

    def __init__(
        self,
        template: QemuTemplate,
        *,
        library: Callable[[], Path | None],
        folder: Path,
        jail: Jail,
        scheduler: StartScheduler,
        saved: VmDelta | None = None,
    ) -> None:
        self._template, self._library, self._folder, self._saved = template, library, folder, saved
        self._jail, self._scheduler = jail, scheduler
        self._server: ForkServer | None = None
        self._backoff = RefillBackoff()
        self._starting: asyncio.Task[None] | None = None

    @property
    @override
    def is_ready(self) -> bool:
        return self._server is not None and self._server.is_alive

    @property
    def template(self) -> QemuTemplate:
        return self._template

    @property
    def address(self) -> str:
        return self._template.address

    def ensure_started(self) -> "asyncio.Task[None] | None":
        """Start a server unless there is one or one is being started; returns the task, if any."""
        is_busy = self._starting is not None and not self._starting.done()
        if not self.is_ready and not is_busy and time.monotonic() >= self._backoff.until_s:
            name = f"start fork server of {self._template.address[:12]}"
            self._starting = asyncio.create_task(self._start(), name=name)
            return self._starting
        return None

    @override
    async def spawn(self, folder: Path) -> QemuVm | None:
        server = self._server
        if server is None or not server.is_alive:
            if self._saved is None:  # else the caller may have closed the state's files
                self.ensure_started()
            return None
        try:
            child = await server.spawn(folder)
        except VmmError as error:
            if self._server is server:
                self._server = None
            await self._failed(error, server)
            if not server.vm.exited.done():
                # It may still fork, and its child would use this folder.
                raise
            _empty_folder(folder)
            return None
        self._scheduler.watch(child)
        return child

    @override
    async def suspend_spawning(self, error: Exception) -> None:
        server, self._server = self._server, None
        if server is not None:  # else another child has reported it
            await self._failed(error, server)

    async def close(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        server, self._server = self._server, None
        if server is not None:
            await server.destroy()

    async def _start(self) -> None:
        try:
            library = await asyncio.to_thread(self._library)
            if library is None:
                self._backoff = RefillBackoff(until_s=float("inf"))
                return
            async with self._scheduler.acquire_start(
                StartWork.RESTORE, is_urgent=self._saved is not None
            ):
                # An earlier server may still be removing its folder.
                folder = self._folder.with_name(f"{self._folder.name}-{secrets.token_hex(4)}")
                _empty_folder(folder)
                self._server = await start_fork_server(
                    self._template, library, folder=folder, jail=self._jail, saved=self._saved
                )
                self._scheduler.watch(self._server.vm)
        except (UnavailableError, OSError) as error:
            await self._failed(error, None)
        else:
            self._backoff = RefillBackoff()

    async def _failed(self, error: Exception, server: ForkServer | None) -> None:
        self._backoff = self._backoff.failed(now_s=time.monotonic())
        metrics.fork_failures.inc()
        log.warning("VMs are started without the fork server for a while: %s", error)
        if server is not None:
            with contextlib.suppress(OSError):
                await server.destroy()


def _empty_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
