"""Process driver: commands in namespaces of the machine's kernel, forked from a warm interpreter.

Covered: no network but the pool's egress proxy, no file of the machine but its programs
(read-only), no other lease, no process of the host, private /tmp, /tests and /logs, an
unprivileged user without capabilities or a way to them, a system call filter, limits on processes,
memory, files, output and time; nothing outlives its command. Not covered: bugs of the host's
kernel, CPU caches, neighbours' share of CPU and disk bandwidth. So it is WEAK: for one tenant and
trusted templates.
"""

import asyncio
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from etude.agent import minitest
from etude.agent.workspace.interface import Runner
from etude.common.api.pool.network import Network
from etude.common.errors import InvalidFieldError
from etude.envserver.drivers import piped_program
from etude.envserver.drivers.base import (
    CommandOutcome,
    DriverCapabilities,
    DriverUnavailableError,
    IsolationStrength,
    Sandbox,
    SandboxError,
)
from etude.envserver.drivers.egress_rules import RuleNames
from etude.envserver.drivers.folder_driver import CAPS, FolderCommand, FolderDriver, FolderSandbox
from etude.envserver.drivers.piped_program import PipedProgram
from etude.envserver.drivers.process import messages
from etude.envserver.drivers.programs import Program
from etude.envserver.egress.environment_egress import PoolEgress
from etude.envserver.egress.listeners import EgressListeners
from etude.envserver.isolation import sandbox_layout
from etude.envserver.isolation.sandbox_layout import CommandLimits, SandboxPaths
from etude.envserver.storage.folders import Owner

START_TIMEOUT_S = 60.0
"""An idle machine takes 0.1 s; a busy one with a cold disk took 10."""
STOP_TIMEOUT_S = 5.0
_MAX_REPORT_BYTES = 1 << 18
_COMMANDS_PER_CORE = 4
"""More only share the cores; a command's time starts when it has its slot."""
_BOOT = "import sys; from etude.envserver.drivers.process.server import main; main(sys.argv[1:])"
_FIX = (
    "run as root, or allow user namespaces: sysctl user.max_user_namespaces=10000 and, where they"
    " exist, kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0;"
    " in a Pod, seccompProfile Unconfined"
)


_CAPS = dataclasses.replace(CAPS, egress=True)
_TOO_LONG = CommandOutcome(output=b"sh: argument list too long\n", exit_code=126)


@dataclass(slots=True)
class ProcessDriver(FolderDriver):
    """One sandbox server for all leases of a host; it is restarted when it dies."""

    scratch: Path
    """Private folder of the host; holds the workspaces."""
    name: str = "process"
    strength: IsolationStrength = IsolationStrength.WEAK
    caps: DriverCapabilities = _CAPS
    egress: PoolEgress | None = None
    """Egress policy; None denies everything."""
    limits: CommandLimits = field(default_factory=CommandLimits)
    """Limits of each command."""
    leases: Path = field(init=False)
    _channel: socket.socket | None = None
    _outbox: messages.ServerOutbox | None = None
    _process: asyncio.subprocess.Process | None = None
    _waiting: dict[int, asyncio.Future[CommandOutcome]] = field(default_factory=dict)
    _ready: asyncio.Future[None] | None = None
    _next_id: int = 0
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _slots: asyncio.Semaphore = field(init=False)
    _doors: EgressListeners = field(default_factory=EgressListeners)

    def __post_init__(self) -> None:
        self.leases = self.scratch / "leases"
        self._slots = asyncio.Semaphore(_COMMANDS_PER_CORE * (os.cpu_count() or 1))

    @override
    def owner(self) -> Owner:
        return Owner(sandbox_layout.outside_uid(), sandbox_layout.outside_gid())

    @override
    async def start(self) -> None:
        """Start the sandbox server.

        Raises:
            DriverUnavailableError: namespaces are not allowed on this machine.
        """
        async with self._starting:
            if self._channel is None:
                await self._spawn()

    @override
    async def stop(self) -> None:
        self._disconnect("the node stops")
        if self._process is not None:
            await _end(self._process)
            self._process = None

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        gate = (
            self.egress.for_environment(template, folder.name) if self.egress is not None else None
        )
        if gate is not None:
            self._doors.allow(gate)
        return FolderSandbox(folder, runner, self.run, self.owner(), launch=self.launch, gate=gate)

    @override
    def replace_network(self, network: Network, rules: RuleNames) -> int:
        return 0 if self.egress is None else self.egress.replace(network, rules)

    @override
    def repeatable_key(self, command: str) -> str:
        # A result that depends on other hosts is not decided by the files.
        key = FolderDriver.repeatable_key(self, command) if self.egress is None else ""
        return key and f"{self.limits} {key}"

    async def launch(self, workspace: Path, program: Program) -> PipedProgram:
        """Start an interactive program.

        Raises:
            InvalidFieldError: its command line is too long.
            SandboxError: the server has ended.
        """
        await self.start()
        outbox = self._outbox
        if outbox is None:
            raise SandboxError("the sandbox server has ended")
        self._next_id += 1
        folder = str(workspace.relative_to(self.leases))
        has_egress = self._doors.has(folder.partition("/")[0])
        job = messages.program_job(
            self._next_id, program, folder, has_egress=has_egress, limits=self.limits
        )
        message = messages.encode(dataclasses.asdict(job))
        if len(message) > sandbox_layout.MAX_REQUEST_BYTES:
            raise InvalidFieldError("command", "with its variables it is longer than 256 KiB")
        report: asyncio.Future[CommandOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[job.job_id] = report
        report.add_done_callback(lambda _: self._waiting.pop(job.job_id, None))
        ends = piped_program.open_pipes(program.terminal, is_merged=program.is_merged)
        outbox.send(message, ends.theirs)
        return PipedProgram(job.job_id, ends, report, is_terminal=program.terminal is not None)

    @override
    async def run(self, command: FolderCommand) -> CommandOutcome:
        if (
            len(command.command.encode("utf-8", "surrogatepass"))
            >= sandbox_layout.MAX_COMMAND_BYTES
        ):
            return _TOO_LONG
        async with self._slots:
            await self.start()
            return await self._run(command)

    async def _run(self, command: FolderCommand) -> CommandOutcome:
        outbox = self._outbox
        if outbox is None:
            raise SandboxError("the sandbox server has ended")
        self._next_id += 1
        has_egress = self._doors.has(command.workspace.relative_to(self.leases).parts[0])
        job = messages.command_job(
            self._next_id, command, self.leases, has_egress=has_egress, limits=self.limits
        )
        message = messages.encode(dataclasses.asdict(job))
        if len(message) > sandbox_layout.MAX_REQUEST_BYTES:
            return _TOO_LONG
        future: asyncio.Future[CommandOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[job.job_id] = future
        try:
            outbox.send(message)
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Kills the supervisor and all below it. The server reports its end after that of the
            # last process, so nothing of the command writes after this call.
            if outbox is self._outbox and not future.done():
                outbox.send(messages.encode({"kill": job.job_id}))
                await asyncio.wait([future], timeout=STOP_TIMEOUT_S)
            future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise
        finally:
            self._waiting.pop(job.job_id, None)

    async def _spawn(self) -> None:
        self.leases.mkdir(parents=True, exist_ok=True)
        paths = _layout(self.leases, self.scratch)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        # The kernel's default refuses a message of this size.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sandbox_layout.MAX_REQUEST_BYTES)
        loop = asyncio.get_running_loop()
        with theirs:
            arguments = (str(theirs.fileno()),)
            self._process = await asyncio.create_subprocess_exec(
                *(paths.python, "-s", "-B", "-P", "-c", _BOOT, *arguments),
                pass_fds=(theirs.fileno(),),
                env={**sandbox_layout.ENVIRONMENT, "PYTHONPATH": _import_path()},
                stdin=asyncio.subprocess.DEVNULL,
                cwd="/",
                # A terminal's Ctrl-C is for the host process, which lets running calls end.
                start_new_session=True,
            )
        self._channel = ours
        self._outbox = messages.ServerOutbox(ours, self._disconnect)
        # Not an argument: commands can read their supervisor's, which is a fork of this.
        self._outbox.send(messages.encode(dataclasses.asdict(paths)))
        self._ready = loop.create_future()
        loop.add_reader(ours, self._read)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._ready
        except (TimeoutError, SandboxError) as cause:
            self._disconnect("the sandbox server did not start")
            raise DriverUnavailableError(
                f"the sandbox server did not start: {cause}", where="driver process", fix=_FIX
            ) from cause

    def _read(self) -> None:
        channel = self._channel
        while channel is not None and channel is self._channel:
            try:
                message, descriptors, _, _ = socket.recv_fds(channel, _MAX_REPORT_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message, descriptors = b"", []
            if not message:
                self._disconnect("the sandbox server died")
                return
            header, _, body = message.partition(b"\n")
            self._take(json.loads(header), body, descriptors)

    def _take(self, header: Mapping[str, Any], body: bytes, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            self._doors.open(header["lease"], header["listening"], socket.socket(fileno=descriptor))
        if "left" in header:
            self._doors.close(header["left"])
        if "lease" in header or "left" in header:
            return
        refused = header.get("refused")
        future: asyncio.Future[Any] | None = self._ready
        if "job_id" in header:
            self._doors.close(number=str(header["job_id"]))
            future = self._waiting.get(header["job_id"])
        if future is None or future.done():
            return
        if refused is not None:
            future.set_exception(SandboxError(str(refused)))
        else:
            future.set_result(messages.decode_report(header, body) if "job_id" in header else None)

    def _disconnect(self, why: str) -> None:
        channel, self._channel = self._channel, None
        outbox, self._outbox = self._outbox, None
        if channel is None or outbox is None:
            return
        outbox.close()
        self._doors.close_all()
        asyncio.get_running_loop().remove_reader(channel)
        channel.close()
        for future in (*self._waiting.values(), self._ready):
            if future is not None and not future.done():
                future.set_exception(SandboxError(why))


def _layout(leases: Path, scratch: Path) -> SandboxPaths:
    new_root = scratch / "root"
    new_root.mkdir(exist_ok=True)
    return SandboxPaths(
        leases=str(leases.resolve()),
        new_root=str(new_root.resolve()),
        # Without a virtual environment's packages: the base interpreter is enough.
        python=str(Path(sys.executable).resolve()),
        prefix=str(Path(sys.base_prefix).resolve()),
        minitest=minitest.__file__,
    )


def _import_path() -> str:
    roots = {str(Path(file).parents[depth]) for file, depth in _OWN_FILES}
    return os.pathsep.join(sorted(roots))


_OWN_FILES = ((minitest.__file__, 2), (sandbox_layout.__file__, 3))
"""Modules that the server imports, and their depth below the source root."""


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
