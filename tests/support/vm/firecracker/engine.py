"""The machine behind the fake: QEMU's, with a memory that the fake can read while it is stopped.

What a real monitor does otherwise: it is one process, its memory comes from the file as the guest
reads it, its diff may have more pages than the guest has changed, its full memory file no holes.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.vm.firecracker.rules import RefusedError, Rules
from typing_extensions import override

from etude.envserver.drivers.vm import host_cpu, sealed_files
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import command_line as machines
from etude.envserver.drivers.vm.qemu import vm
from etude.envserver.drivers.vm.qemu.boot import BootConsole
from etude.envserver.drivers.vm.qemu.command_line import (
    PROGRAM,
    SANDBOX,
    BootFiles,
    QemuConfig,
    VmmFiles,
)
from etude.envserver.drivers.vm.qemu.migration import receive, send
from etude.envserver.drivers.vm.qemu.vm import QemuVm

_MAGIC = b"FAKEFIRE"
_PAGE = 4096
_PART = 4 << 20
_ELF = b"\x7fELF"
_WORDS = {"envchannel=vsock", "8250.nr_uarts=0"}
_FOLDER = ".fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends(Jail):
    """It has a jail already; QEMU only ends with it."""

    @override
    def command(self, program: Sequence[str], **limits: Any) -> tuple[str, ...]:
        return ("/usr/bin/setpriv", "--pdeathsig", "KILL", *program)


class Engine:
    """One machine, and the files of its jail."""

    def __init__(self, root: Path) -> None:
        """There is no machine yet; root is what the monitor sees as `/`."""
        self._root = root
        self._vm: QemuVm | None = None
        self._memory = self._clean = -1
        self._config: dict[str, Any] = {}
        self._console: BootConsole | None = None

    @property
    def vm(self) -> QemuVm:
        assert self._vm is not None
        return self._vm

    def path(self, name: str) -> Path:
        """Where a path of the API leads: never out of the jail.

        Raises:
            RefusedError: it cannot be.
        """
        found = self._root / name.lstrip("/")
        if ".." in found.parts:
            raise RefusedError(f"No such file or directory: {name}")
        return found

    def opened(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A file of the API, open for reading unless asked, as the machine's user may.

        Raises:
            RefusedError: it cannot be.
        """
        try:
            found = os.open(self.path(name), flags | os.O_CLOEXEC)
        except OSError as cause:
            raise RefusedError(f"{cause.strerror} (os error {cause.errno}): {name}") from cause
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise RefusedError(f"{name} is no file")
        return found

    async def boot(self, rules: Rules) -> None:
        """Start the configured machine; its guest boots from here on.

        Raises:
            RefusedError: it cannot be.
        """
        boot = rules.boot
        assert boot is not None
        assert rules.vsock is not None
        if missing := _WORDS - set(boot["boot_args"].split()):
            raise RefusedError(f"the guest's kernel is not told {missing}")
        kernel, initramfs = self.opened(boot["kernel_image_path"]), self.opened(boot["initrd_path"])
        if os.pread(kernel, 4, 0) != _ELF:
            raise RefusedError(
                "Cannot load kernel due to invalid memory configuration or image: no ELF"
            )
        root, disk = self._drives(rules.drives)
        machine = _machine(rules.machine, disk)
        self._memory = sealed_files.create("memory", machine.memory_bytes)
        self._console = BootConsole()
        console = self._console.theirs.fileno()
        files = BootFiles(kernel=kernel, initramfs=initramfs, console=console)

        def arguments(sockets: vm.VmmSockets) -> tuple[str, ...]:
            wiring = VmmFiles(
                memory=self._memory, qmp=sockets.qmp, agent=sockets.agent, root=root, disk=disk
            )
            ours = machines.boot_arguments(machine, wiring, files)
            words = _with_words(ours, f"{boot['boot_args']} tsc_early_khz={machine.tsc_khz}")
            return (PROGRAM, *words, *SANDBOX)

        inherited = (self._memory, root, kernel, initramfs, console, disk)
        await self._start(machine, arguments, inherited)
        self._config = {"machine": rules.machine, "drives": rules.drives, "vsock": rules.vsock}
        self._clean = -1

    async def load(self, body: dict[str, Any], rules: Rules) -> None:
        """Take up a snapshot; the machine stands still.

        Raises:
            RefusedError: it cannot be.
        """
        state = self.opened(body["snapshot_path"])
        source = self.opened(body["mem_backend"]["backend_path"])
        if os.pread(state, len(_MAGIC), 0) != _MAGIC:
            raise RefusedError("Load snapshot error: Failed to restore from snapshot: bad magic")
        size = int.from_bytes(os.pread(state, 4, len(_MAGIC)), "big")
        self._config = json.loads(os.pread(state, size, len(_MAGIC) + 4))
        root, disk = self._drives(self._config["drives"])
        machine = _machine(self._config["machine"], disk)
        if os.fstat(source).st_size != machine.memory_bytes:
            raise RefusedError(
                "Load snapshot error: the memory file has another size than the memory"
            )
        rules.vsock, self._clean = self._config["vsock"], source
        self._memory = sealed_files.create("memory", machine.memory_bytes)
        for offset, data in sealed_files.nonzero_pages(source):
            os.pwrite(self._memory, data, offset)

        def arguments(sockets: vm.VmmSockets) -> tuple[str, ...]:
            wiring = VmmFiles(
                memory=self._memory, qmp=sockets.qmp, agent=sockets.agent, root=root, disk=disk
            )
            words = machines.clone_arguments(machine, wiring)
            shared = (word.replace("share=off", "share=on") for word in words)
            return (PROGRAM, *shared, *SANDBOX)

        await self._start(machine, arguments, (self._memory, root, disk))
        with sealed_files.reopen(state, len(_MAGIC) + 4 + size) as devices:
            await receive(self.vm, devices, has_memory=False)
        os.close(state)

    def _drives(self, drives: dict[str, dict[str, Any]]) -> tuple[int, int]:
        """The read-only root, and the disk.

        Raises:
            RefusedError: they cannot be opened, or the root could be written.
        """
        root, disk = drives["root"], drives["disk"]
        if not root["is_read_only"]:
            raise RefusedError("this fake has a read-only root only")
        opened = self.opened(root["path_on_host"])
        return opened, self.opened(disk["path_on_host"], os.O_RDWR)

    async def create(self, body: dict[str, Any]) -> None:
        """Write a snapshot of the machine, which stands still.

        Raises:
            RefusedError: it cannot be.
        """
        devices = sealed_files.create("devices")
        await send(self.vm, devices, leaves_memory=True)
        config = json.dumps(self._config).encode()
        content = _MAGIC + len(config).to_bytes(4, "big") + config + sealed_files.read_all(devices)
        os.close(devices)
        is_diff = body["snapshot_type"] == "Diff"
        try:
            self.path(body["snapshot_path"]).write_bytes(content)
            self._write_memory(self.path(body["mem_file_path"]), is_diff=is_diff)
        except OSError as cause:
            raise RefusedError(f"Create snapshot error: {cause}") from cause

    def _write_memory(self, path: Path, *, is_diff: bool) -> None:
        """All of the memory, or over what is there what changed since it was clean."""
        size = os.fstat(self._memory).st_size
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(target).st_size != size:
            os.ftruncate(target, 0)
        os.ftruncate(target, size)
        for offset, data in self._dirty() if is_diff else sealed_files.nonzero_pages(self._memory):
            os.pwrite(target, data, offset)
        os.close(target)
        clean = sealed_files.create("clean", size)
        for offset, data in sealed_files.nonzero_pages(self._memory):
            os.pwrite(clean, data, offset)
        os.close(self._clean) if self._clean >= 0 else None
        self._clean = clean

    def _dirty(self) -> list[tuple[int, bytes]]:
        found = []
        for offset in _touched(self._memory):
            now, then = (os.pread(each, _PART, offset) for each in (self._memory, self._clean))
            if now != then:
                rows = [np.frombuffer(each, np.uint8).reshape(-1, _PAGE) for each in (now, then)]
                pages = np.flatnonzero((rows[0] != rows[1]).any(axis=1)) * _PAGE
                found += [(offset + at, now[at : at + _PAGE]) for at in pages.tolist()]
        return found

    async def _start(self, machine: QemuConfig, arguments: Any, inherited: tuple[int, ...]) -> None:
        folder = self._root / _FOLDER
        folder.mkdir(mode=0o700)
        self._vm = await vm.start(
            machine, arguments, descriptors=inherited, folder=folder, jail=Ends()
        )


def _with_words(arguments: tuple[str, ...], words: str) -> tuple[str, ...]:
    """The guest's kernel is told what the driver tells it, but where the agent really is."""
    at = arguments.index("-append") + 1
    words = words.replace("envchannel=vsock", "").replace("reboot=k", "reboot=t")
    return (*arguments[:at], words, *arguments[at + 1 :])


def _machine(config: dict[str, Any], disk: int) -> QemuConfig:
    return QemuConfig(
        memory_mib=config["mem_size_mib"],
        disk_mib=os.fstat(disk).st_size >> 20,
        tsc_khz=host_cpu.host_tsc_khz(),
    )


def _touched(memory: int) -> Iterator[int]:
    """Where the parts begin in which there is anything."""
    offset, size = 0, os.fstat(memory).st_size
    while offset < size:
        try:
            found = os.lseek(memory, offset, os.SEEK_DATA)
        except OSError:  # nothing is left
            return
        yield found - found % _PART
        offset = found - found % _PART + _PART
