"""Records of a lease on disk, from which a host's next process adopts it.

leases/<lease id>/state.json      written once, last: the lease exists from then on
                 /calls.jsonl     before and after each turn that may change something
                 /paused.json     while the environment waits on the disk
                 /rollback.json   while files and calls go back to those of a snapshot
                 /…               what the driver keeps of its sandbox
"""

import base64
import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from etude.common import atomic
from etude.common.errors import CorruptError
from etude.v1 import environments_pb2

LEASE_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,79}$")
STATE, CALLS = "state.json", "calls.jsonl"
PAUSED, ROLLBACK = "paused.json", "rollback.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One lease as it was granted."""

    held: environments_pb2.HeldLease
    template: str
    """Driver's name of its template, which has the digest of the task's image."""
    uri: str
    toolset: str
    source_key: str
    """Identity of the first files: a source that has changed since cannot be compared with."""
    on_expiry: int = environments_pb2.ON_EXPIRY_KILL
    """Action when the lease expires."""
    snapshot_id: str = ""
    """Snapshot of its run that it started from, if any."""
    image: str = ""
    """Image that its task names by digest, if any."""
    is_prepared: bool = False
    """True if its task was set up in it, or in what it is a fork of, before any agent's call."""
    setup_files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that the set-up wrote, by path; empty for those that it deleted."""

    @property
    def lease_id(self) -> str:
        """Id of the lease, and name of its folder."""
        return self.held.lease.lease_id


class CallHistory(NamedTuple):
    """Results of a lease's calls, read from its log."""

    results: Mapping[str, environments_pb2.ToolResult]
    """By call id."""
    digests: Mapping[str, str]
    """Digests of these calls."""
    before: str | None
    """Identity of the workspace before the turn that was cut off; empty: not known; None: no turn
    was cut off."""


def save_record(folder: Path, record: LeaseRecord) -> None:
    """Make the lease durable; its folder must exist."""
    write_json(
        folder / STATE,
        {
            "held": base64.b64encode(record.held.SerializeToString()).decode(),
            "template": record.template,
            "uri": record.uri,
            "toolset": record.toolset,
            "source_key": record.source_key,
            "on_expiry": record.on_expiry,
            "snapshot_id": record.snapshot_id,
            "image": record.image,
            "is_prepared": record.is_prepared,
            "setup_files": dict(record.setup_files),
        },
    )


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a value as JSON, durably and atomically."""
    atomic.write_bytes(path, json.dumps(value).encode(), fsync=True, mode=0o600)


def read_json(path: Path) -> Mapping[str, Any] | None:
    """Read a JSON object, None if there is no file.

    Raises:
        CorruptError: it cannot be read.
    """
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as cause:
        raise CorruptError(f"{path}: {cause}") from cause
    if not isinstance(said, dict):
        raise CorruptError(f"{path}: is not an object")
    return said


def load_record(folder: Path) -> LeaseRecord:
    """Read the lease of a folder.

    Raises:
        CorruptError: there is none, or it cannot be read.
    """
    try:
        raw = json.loads((folder / STATE).read_bytes())
        held = environments_pb2.HeldLease.FromString(base64.b64decode(raw.pop("held")))
        record = LeaseRecord(held=held, **raw)
    except (OSError, ValueError, TypeError, KeyError, DecodeError) as cause:
        raise CorruptError(f"{folder / STATE}: {cause}") from cause
    if record.lease_id != folder.name:
        raise CorruptError(f"{folder / STATE} names lease {record.lease_id!r}")
    return record


@dataclass(slots=True)
class CallLog:
    """Appends to a lease's calls.jsonl; survives the death of the process, not of the machine."""

    path: Path
    _descriptor: int = field(default=-1, init=False)

    def begin(self, before: str) -> None:
        """A turn starts on a workspace of this identity, or of an unknown one."""
        self._append({"begin": before})

    def end(self, digests: Mapping[str, str], results: environments_pb2.RunTurnResponse) -> None:
        """The turn has ended with these results."""
        data = base64.b64encode(results.SerializeToString()).decode()
        self._append({"digests": digests, "end": data})

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, row: Mapping[str, object]) -> None:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
        os.write(self._descriptor, json.dumps(row).encode() + b"\n")


def write_calls(
    path: Path, digests: Mapping[str, str], results: environments_pb2.RunTurnResponse
) -> None:
    """Write a call log with exactly these calls, atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    log = CallLog(partial)
    try:
        log.end(digests, results)
    finally:
        log.close()
    partial.rename(path)


def read_calls(path: Path) -> CallHistory:
    """Read a call log back; a last line that was cut off counts as not written.

    Raises:
        CorruptError: a line in the middle cannot be read.
    """
    results: dict[str, environments_pb2.ToolResult] = {}
    digests: dict[str, str] = {}
    before: str | None = None
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError):
        *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if "begin" in row:
                before = row["begin"]
                continue
            data = base64.b64decode(row["end"])
            for result in environments_pb2.RunTurnResponse.FromString(data).results:
                results[result.call_id] = result
            digests |= row["digests"]
            before = None
        except (ValueError, KeyError, TypeError, DecodeError) as cause:
            raise CorruptError(f"{path} line {number}: {cause}") from cause
    return CallHistory(results, digests, before)
