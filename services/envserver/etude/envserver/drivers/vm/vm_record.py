"""Record of a VMM process on disk, by which a successor of this process finds it.

It is written to the VM's folder before the guest's first instruction, and again when a lease uses
the VM. A successor ends VMs that no lease uses.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from etude.common import atomic
from etude.common.errors import CorruptError
from etude.envserver.drivers.process_identity import ProcessId

FILE = "vm.json"
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class VmRecord:
    """One VMM process and the lease that uses it."""

    process: ProcessId
    uid: int
    template: str = ""
    """Address of its template."""
    env_id: str = ""
    generation: int = 0
    """Generation of its last SYNC."""
    is_begun: bool = False
    """Whether the environment's initial files are in it."""


def save(folder: Path, record: VmRecord, *, is_durable: bool) -> None:
    """Write the record atomically."""
    data = json.dumps(asdict(record)).encode()
    atomic.write_bytes(folder / FILE, data, fsync=is_durable, mode=0o600)


def load(folder: Path) -> VmRecord | None:
    """Load the record of a VM folder; None if there is none.

    Raises:
        CorruptError: it cannot be read.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            row = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as cause:
        raise CorruptError(f"{path}: {cause}") from cause
    match row:
        case {
            "process": {"pid": int(pid), "started": int(started), "boot": str(boot)},
            "uid": int(uid),
            "template": str(template),
            "env_id": str(env_id),
            "generation": int(generation),
            "is_begun": bool(is_begun),
        }:
            return VmRecord(
                process=ProcessId(pid=pid, started=started, boot=boot),
                uid=uid,
                template=template,
                env_id=env_id,
                generation=generation,
                is_begun=is_begun,
            )
        case _:
            raise CorruptError(f"{path}: is not a VM record")


def record_use(folder: Path, *, env_id: str, generation: int) -> None:
    """Record that a lease uses the VM, with all initial files in it.

    Raises:
        CorruptError: there is no record.
    """
    noted = load(folder)
    if noted is None:
        raise CorruptError(f"{folder / FILE}: is missing")
    begun = replace(noted, env_id=env_id, generation=generation, is_begun=True)
    save(folder, begun, is_durable=True)
