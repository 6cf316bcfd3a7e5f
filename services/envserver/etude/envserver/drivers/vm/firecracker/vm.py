"""One Firecracker process (VMM): its jail, its API, the connection to its guest's agent."""

import asyncio
import os
import secrets
import socket
import subprocess
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from etude.envserver.drivers import process_identity
from etude.envserver.drivers.process_identity import ProcessId, identify, open_pidfd
from etude.envserver.drivers.vm import vmm_processes
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import api_requests, jail
from etude.envserver.drivers.vm.firecracker.api_client import FirecrackerApi
from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerJail, FirecrackerPrograms
from etude.envserver.drivers.vm.vmm_process import VmmProcess, is_paused, last_output, pidfd_of

START_LIMIT_S = 30.0
_LOOK_S = 0.005
_HANDSHAKE_LIMIT_S = 30.0
_HANDSHAKE_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HostContext:
    """Environment that all VMs of a host share."""

    programs: FirecrackerPrograms
    prefix: str
    """Prefix of the VM ids, unique for the host."""
    netns: int
    """An open, empty network namespace."""


@dataclass(slots=True, kw_only=True)
class FirecrackerVm(VmmProcess):
    """A running Firecracker process. Its folder is private to the host and removed with it."""

    keeps_channel: ClassVar[bool] = False
    machine: FirecrackerConfig
    programs: FirecrackerPrograms
    snapshot_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One snapshot at a time."""

    @property
    def jail(self) -> FirecrackerJail:
        """Its jail in the VM's folder, which moves when a lease takes the VM."""
        return jail.find_jail(self.folder, self.programs)

    @property
    @override
    def disk_folder(self) -> Path:
        return self.jail.root

    @property
    def api(self) -> FirecrackerApi:
        return FirecrackerApi(partial(jail.dial, self.jail, jail.API))

    @override
    async def agent(self) -> socket.socket:
        connection = jail.dial(self.jail, api_requests.CHANNEL)
        try:
            async with asyncio.timeout(_HANDSHAKE_LIMIT_S):
                await _greet(connection)
        except (OSError, TimeoutError) as cause:
            connection.close()
            raise VmmError(f"agent of VM {self.pid} cannot be reached: {cause}") from cause
        except BaseException:
            connection.close()
            raise
        return connection

    @override
    async def is_stopped(self) -> bool:
        """Tell whether the VM is paused.

        Raises:
            VmmError: it is in a state that cannot be resumed.
        """
        return is_paused((await self.api.get("/")).get("state"))

    @override
    async def freeze(self) -> None:
        await self.api.patch("/vm", api_requests.PAUSE)

    @override
    async def thaw(self) -> None:
        await self.api.patch("/vm", api_requests.RESUME)

    @override
    async def console(self) -> str:
        """Return nothing: the guest has no serial console, on which it could write to the host."""
        return ""


async def start(
    machine: FirecrackerConfig,
    ground: HostContext,
    *,
    folder: Path,
    uid: int,
    template: str = "",
) -> FirecrackerVm:
    """Start a VMM in a jail; it has no guest yet.

    Raises:
        VmmError: it did not start; the message has its last output.
    """
    cell = FirecrackerJail(
        programs=ground.programs,
        folder=folder,
        vm_id=f"{ground.prefix}-{secrets.token_hex(8)}",
    )
    (folder / "jail").mkdir(mode=0o700)
    netns = f"/proc/{os.getpid()}/fd/{ground.netns}"
    words = jail.command(cell, machine, uid=uid, gid=uid, netns=netns)
    process = await _start_process(words, cell, uid)
    pidfd = open_pidfd(process)
    if pidfd is None:
        raise VmmError(f"the VMM ended: {last_output(folder)}")
    vm = _watch(machine, ground.programs, folder, process.pid, pidfd)
    try:
        await asyncio.to_thread(vm.save_record, process, uid=uid, template=template)
        await _wait_for_api(vm)
    except BaseException:
        await vm.destroy()
        raise
    return vm


async def adopt(
    machine: FirecrackerConfig, programs: FirecrackerPrograms, folder: Path, process: ProcessId
) -> FirecrackerVm:
    """Adopt a VMM that an earlier process of this host started.

    Raises:
        VmmError: it has ended or does not answer; then it is killed, and its folder stays.
    """
    vm = _watch(machine, programs, folder, process.pid, pidfd_of(process))
    try:
        await vm.is_stopped()
    except BaseException:
        await vm.kill()
        raise
    return vm


async def _start_process(words: tuple[str, ...], cell: FirecrackerJail, uid: int) -> ProcessId:
    """Start the VMM's process; a cancelled caller leaves none.

    Raises:
        CancelledError: the caller was cancelled.
    """
    making = asyncio.create_task(asyncio.to_thread(_run_jailer, words, cell, uid), name="jailer")
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if making.exception() is None:
            await asyncio.to_thread(vmm_processes.kill_processes, [making.result()])
        raise


def _run_jailer(words: tuple[str, ...], cell: FirecrackerJail, uid: int) -> ProcessId:
    """Run the jailer, and identify the VMM's process. Blocks.

    Raises:
        VmmError: the jailer failed.
    """
    try:
        with (cell.folder / "stderr").open("wb") as told:
            # Its output is discarded: the guest may have caused it.
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
                start_new_session=True,
                timeout=START_LIMIT_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise VmmError(f"the jailer failed: {cause}") from cause
    if done.returncode:
        raise VmmError(f"the jailer ended with {done.returncode}: {last_output(cell.folder)}")
    return _identify_vmm(cell, uid)


def _identify_vmm(cell: FirecrackerJail, uid: int) -> ProcessId:
    """Identify the process that the jailer recorded; no guest has run in it yet.

    Raises:
        VmmError: it has ended.
    """
    try:
        text = cell.pid_file.read_text(encoding="ascii").strip()
        process = identify(int(text))
        owner = Path(f"/proc/{int(text)}").stat().st_uid
    except (OSError, ValueError) as cause:
        raise VmmError(f"the VMM ended: {last_output(cell.folder) or cause}") from cause
    if process is None or owner not in {uid, 0}:
        raise VmmError(f"the VMM ended: {last_output(cell.folder)}")
    return process


async def _wait_for_api(vm: FirecrackerVm) -> None:
    """Wait for the VMM's API.

    Raises:
        VmmError: it has ended, or does not answer.
    """
    limit_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            await vm.api.get("/")
        except VmmError as error:
            if vm.exited.done():
                raise VmmError(f"the VMM ended: {last_output(vm.folder) or error}") from error
            if time.monotonic() > limit_s:
                raise
            await asyncio.sleep(_LOOK_S)
        else:
            return


def _watch(
    machine: FirecrackerConfig, programs: FirecrackerPrograms, folder: Path, pid: int, pidfd: int
) -> FirecrackerVm:
    exited = process_identity.exit_future(pidfd, lambda: None)
    return FirecrackerVm(
        machine=machine, programs=programs, folder=folder, pid=pid, pidfd=pidfd, exited=exited
    )


async def _greet(connection: socket.socket) -> None:
    """Connect to the agent's port. Nothing is read beyond the answer's line.

    Raises:
        VmmError: the agent does not listen.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, f"CONNECT {api_requests.AGENT_PORT}\n".encode())
    said = b""
    while not said.endswith(b"\n") and len(said) < _HANDSHAKE_BYTES:
        byte = await loop.sock_recv(connection, 1)
        if not byte:
            raise VmmError(f"port {api_requests.AGENT_PORT} of the guest has no listener")
        said += byte
    if not (said.startswith(b"OK ") and said.endswith(b"\n") and said[3:-1].isdigit()):
        raise VmmError(f"the VMM answers CONNECT with {said!r}")
