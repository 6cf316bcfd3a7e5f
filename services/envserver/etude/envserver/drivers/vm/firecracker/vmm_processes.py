"""Discovery of this host's Firecracker processes.

The jailer clears the environment of what it starts, and gives it mounts of its own: a process is
known by its VM id, which the jailer puts on its command line.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from typing_extensions import override

from etude.envserver.drivers import process_identity
from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.vm.vmm_processes import VmFolders

_PREFIX_DIGITS = 16
_MAX_BYTES = 4096


def vm_id_prefix(scratch: Path) -> str:
    """Prefix of the VM ids of a host, unique for its scratch folder."""
    found = scratch.stat()
    made_of = f"{scratch.resolve()} {found.st_dev} {found.st_ino}"
    return blake3(made_of.encode()).hexdigest()[:_PREFIX_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerFolders(VmFolders):
    """Folders of a host's VMs, and discovery of their processes."""

    @override
    def find_processes(self) -> dict[ProcessId, Path]:
        beginning = f"{vm_id_prefix(self.scratch)}-"
        folders = {_vm_id(folder): folder for folder in self.folders()}
        found = {}
        for entry in os.scandir("/proc"):
            vm_id = _vm_id_of_process(entry.name, beginning) if entry.name.isdecimal() else None
            process = process_identity.identify(int(entry.name)) if vm_id else None
            if process is not None and vm_id is not None:
                # A folder that is gone has no record, so the process is an orphan.
                found[process] = folders.get(vm_id, self.scratch / vm_id)
        return found


def _vm_id(folder: Path) -> str:
    """Id of the VM in a folder; empty if there is none."""
    return next((path.name for path in folder.glob("jail/*/*") if path.is_dir()), "")


def _vm_id_of_process(pid: str, beginning: str) -> str | None:
    """Read the VM id on a process's command line, if it is one of this host's."""
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            words = file.read(_MAX_BYTES).decode(errors="replace").split("\0")
    except OSError:
        return None  # it has ended, or belongs to another user
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        name, _, behind = flag.partition("=")
        vm_id = behind or value
        if name == "--id" and vm_id.startswith(beginning):
            return vm_id
    return None
