"""What a node writes down about a machine, so that its successor finds the process again.

It lies in the machine's folder, is written before the guest's first instruction, and once more when
the machine is somebody's: what is not begun by then is nobody's, and is ended.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from etude.common.errors import CorruptError
from etude.envserver.drivers.machines.identity import ProcessId

FILE = "vm.json"
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class VmRecord:
    """One machine monitor, and whose machine it runs."""

    process: ProcessId
    uid: int
    """Whom it runs as."""
    template: str = ""
    """Address of what it is a clone of."""
    env_id: str = ""
    generation: int = 0
    """Of its last SYNC."""
    is_begun: bool = False
    """Whether the environment's first files are in it."""


def save(folder: Path, record: VmRecord, *, is_durable: bool) -> None:
    """Write the record, whole or not at all.

    Args:
        folder: the machine's.
        record: what is so.
        is_durable: whether it has to outlive the host's power too.

    Raises:
        OSError: it cannot be written.
    """
    partial = folder / f".{FILE}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(asdict(record)).encode())
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.rename(folder / FILE)
    if is_durable:
        _sync(folder)


def load(folder: Path) -> VmRecord | None:
    """The record of a machine's folder; None if there is none.

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
            raise CorruptError(f"{path}: is no record of a machine")


def begin(folder: Path, *, env_id: str, generation: int) -> None:
    """Write down that the machine is an environment's, with all of its first files in it.

    Raises:
        OSError: it cannot be written.
        CorruptError: nobody wrote down which process the machine is.
    """
    noted = load(folder)
    if noted is None:
        raise CorruptError(f"{folder / FILE}: is missing")
    begun = replace(noted, env_id=env_id, generation=generation, is_begun=True)
    save(folder, begun, is_durable=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
