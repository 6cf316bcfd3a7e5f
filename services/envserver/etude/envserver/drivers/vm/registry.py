"""Registry of a host's VMs: hand-over from one process to the next, adoption, orphan sweeps.

All that a successor needs is on disk before it matters, so the process may be killed between any
two lines: the successor adopts the VMs of leases and ends all others.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.common import atomic
from etude.envserver.drivers import scratch_folder
from etude.envserver.drivers.base import SandboxError
from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.vm import guest_vm, vmm_processes
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.interface import Vmm, VmTemplate
from etude.envserver.drivers.vm.vm_record import VmRecord
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER, VmFolders
from etude.envserver.guest.channel import GuestLostError

MAX_CONCURRENT = 8
"""Adoptions that run concurrently: each waits for its own VMM; frozen VMs are not woken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Outcome of an adoption."""

    guests: Mapping[Path, GuestVm]
    """VMs that were adopted, by VM folder."""
    lost: Mapping[Path, str]
    """Reasons why the others were not; their processes are ended."""


async def adopt_vms(left: Mapping[Path, VmRecord], templates: Mapping[str, VmTemplate]) -> Adoption:
    """Adopt VMs of these templates."""
    places = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(folder: Path, noted: VmRecord) -> GuestVm | str:
        async with places:
            try:
                return await _adopt_one(folder, noted, templates)
            except (VmmError, GuestLostError) as error:
                return str(error)

    found = await asyncio.gather(*(one(folder, noted) for folder, noted in left.items()))
    outcomes = dict(zip(left, found, strict=True))
    return Adoption(
        guests={at: each for at, each in outcomes.items() if isinstance(each, GuestVm)},
        lost={at: each for at, each in outcomes.items() if isinstance(each, str)},
    )


async def _adopt_one(folder: Path, noted: VmRecord, templates: Mapping[str, VmTemplate]) -> GuestVm:
    """Adopt one VM: a running one gets a new token, a frozen one stays frozen.

    Raises:
        VmmError: the VMM has ended, or its state cannot be resumed.
    """
    found = await templates[noted.template].adopt(folder, noted.process)
    try:
        return await guest_vm.adopt_guest(
            found,
            name=noted.env_id,
            generation=noted.generation,
            is_stopped=await found.is_stopped(),
        )
    except BaseException:
        await found.kill()
        raise


log = logging.getLogger(__name__)

SWEEP_S = 30.0
YOUNG_S = 60.0
"""A VMM of this age without a record never gets one."""
_KEY_BYTES = 32


@dataclass(slots=True)
class VmRegistry:
    """VMs of one scratch folder."""

    scratch: Path
    folders: VmFolders | None = None
    """Process discovery of another kind of VMM, if it has one."""
    _folders: VmFolders = field(init=False)
    _key: bytes | None = None
    _lock: int = -1
    _left: dict[Path, VmRecord] = field(default_factory=dict)
    """Records of leases' VMs from an earlier process."""
    _adopted: dict[Path, GuestVm] = field(default_factory=dict)
    """Adopted VMs that no lease has claimed yet."""
    _lost: dict[Path, str] = field(default_factory=dict)
    _sweeper: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self._folders = self.folders or VmFolders(scratch=self.scratch)

    @property
    def templates(self) -> Path:
        """Parent of the cached templates' folders, named by compat_key."""
        return self.scratch / "templates"

    @property
    def key(self) -> bytes:
        """Secret key that authenticates files written by this host.

        Raises:
            SandboxError: the driver was not started.
        """
        if self._key is None:
            raise SandboxError("the driver was not started")
        return self._key

    async def open(self) -> None:
        """Lock the folder, and end every VM that cannot be adopted.

        Raises:
            DriverUnavailableError: another process has it.
        """
        if self._lock >= 0:
            return
        self._folders.leases.mkdir(parents=True, exist_ok=True)
        self._lock = await scratch_folder.lock_scratch(self.scratch)
        self._key = _load_key(self.scratch / "key")
        self._left = await asyncio.to_thread(vmm_processes.reap_at_start, self._folders)

    @property
    def uids(self) -> list[int]:
        """User ids of VMs from an earlier process that are not adopted yet."""
        return [noted.uid for noted in self._left.values()]

    def memory_sharers(self) -> dict[str, list[int]]:
        """List processes of adoptable VMs that share a template's memory, by template address."""
        found: dict[str, list[int]] = {}
        for noted in self._left.values():
            found.setdefault(noted.template, []).append(noted.process.pid)
        return found

    async def adopt(self, templates: Iterable[VmTemplate]) -> list[Vmm]:
        """Adopt the VMs of some templates that an earlier process left, and start orphan sweeps.

        VMs of other templates wait for a later call, or for the claim of their lease.

        Returns:
            The adopted VMs.
        """
        by_address = {template.address: template for template in templates}
        left = {at: noted for at, noted in self._left.items() if noted.template in by_address}
        self._left = {at: noted for at, noted in self._left.items() if at not in left}
        began_s = time.monotonic()
        found = await adopt_vms(left, by_address)
        self._adopted.update(found.guests)
        self._lost.update(found.lost)
        took_s = time.monotonic() - began_s
        log.info("adopted %d of %d VMs in %.2f s", len(found.guests), len(left), took_s)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._keep_sweeping(), name="sweep VMs")
        return [guest.vm for guest in found.guests.values()]

    def claim(self, lease: Path) -> GuestVm | None:
        """Claim the VM that an earlier process started for a lease; None if it started none.

        Raises:
            SandboxError: it has ended.
        """
        folder = lease / VM_FOLDER
        guest = self._adopted.pop(folder, None)
        unadopted = self._left.pop(folder, None)
        if unadopted is not None:
            vmm_processes.kill_processes([unadopted.process])
            raise SandboxError(
                f"VM of lease {lease.name} has ended: its template is not booted any more"
            )
        if guest is None and folder.exists():
            why = self._lost.pop(folder, "it was not adopted")
            raise SandboxError(f"VM of lease {lease.name} has ended: {why}")
        return guest

    async def sweep(self, *, least_age_s: float = YOUNG_S) -> int:
        """End VMs without a lease; returns how many."""
        unwanted = [folder for folder in self._adopted if not folder.exists()]
        for folder in unwanted:
            await self._adopted.pop(folder).destroy()
        for folder in [folder for folder in self._left if not folder.exists()]:
            unwanted.append(folder)
            process = self._left.pop(folder).process
            await asyncio.to_thread(vmm_processes.kill_processes, [process])
        num_ended = len(unwanted)
        num_ended += await asyncio.to_thread(_end_orphans, self._folders, least_age_s)
        if num_ended:
            log.warning("ended %d orphaned VMs", num_ended)
        return num_ended

    async def close(self) -> None:
        """Release the folder; VMs of leases stay for the next process."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except OSError:
                log.exception("orphaned VMs stay until the next sweep")


def _end_orphans(places: VmFolders, least_age_s: float) -> int:
    lost = _find_orphans(places, least_age_s)
    # Checked twice: a VM may have moved to another folder while folders were listed.
    return (
        vmm_processes.kill_processes(set(lost).intersection(_find_orphans(places, least_age_s)))
        if lost
        else 0
    )


def _find_orphans(places: VmFolders, least_age_s: float) -> list[ProcessId]:
    seen = places.find_processes()
    known = {noted.process for noted in vmm_processes.load_records(places).values()}
    return vmm_processes.find_orphans(seen, known, least_age_s=least_age_s)


def _load_key(path: Path) -> bytes:
    """Load the host's secret key, or create it."""
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) == _KEY_BYTES:
        return key
    key = secrets.token_bytes(_KEY_BYTES)
    atomic.write_bytes(path, key, mode=0o600)
    return key
