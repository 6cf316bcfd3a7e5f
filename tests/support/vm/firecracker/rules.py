"""Which requests Firecracker takes, in which order, and how it refuses the others.

Sources, all of Firecracker's own repository:
- src/firecracker/swagger/firecracker.yaml: routes, fields, which are required, 204 and 400, the
  shape of a fault, the states of an instance.
- docs/snapshotting/snapshot-support.md: a load only before anything is configured, snapshots only
  of a paused machine, a machine that is loaded is paused, a load that fails ends the process.
- The texts of faults are those of src/vmm/src/rpc_interface.rs and src/firecracker/src/api_server.
Stricter than the original: a Diff needs a machine whose pages are tracked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class Phase(Enum):
    """As GET / says it."""

    NOT_STARTED = "Not started"
    RUNNING = "Running"
    PAUSED = "Paused"


class RefusedError(Exception):
    """A request that is refused: 400 with a fault_message."""


class Order(NamedTuple):
    """What a request that is taken asks for."""

    name: str
    body: Mapping[str, Any]


_BOOL, _INT, _STR, _MAP = (bool,), (int,), (str,), (dict,)

_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "machine-config": {
        "vcpu_count": _INT,
        "mem_size_mib": _INT,
        "smt": _BOOL,
        "track_dirty_pages": _BOOL,
        "cpu_template": _STR,
        "huge_pages": _STR,
    },
    "boot-source": {"kernel_image_path": _STR, "initrd_path": _STR, "boot_args": _STR},
    "drives": {
        "drive_id": _STR,
        "path_on_host": _STR,
        "is_root_device": _BOOL,
        "is_read_only": _BOOL,
        "partuuid": _STR,
        "cache_type": _STR,
        "rate_limiter": _MAP,
        "io_engine": _STR,
    },
    "vsock": {"guest_cid": _INT, "uds_path": _STR, "vsock_id": _STR},
    "entropy": {"rate_limiter": _MAP},
    "actions": {"action_type": _STR},
    "vm": {"state": _STR},
    "create": {"snapshot_type": _STR, "snapshot_path": _STR, "mem_file_path": _STR},
    "load": {
        "snapshot_path": _STR,
        "mem_backend": _MAP,
        "mem_file_path": _STR,
        "enable_diff_snapshots": _BOOL,
        "track_dirty_pages": _BOOL,
        "resume_vm": _BOOL,
        "network_overrides": (list,),
    },
    "mem_backend": {"backend_type": _STR, "backend_path": _STR},
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "machine-config": ("vcpu_count", "mem_size_mib"),
    "boot-source": ("kernel_image_path",),
    "drives": ("drive_id", "is_root_device"),
    "vsock": ("guest_cid", "uds_path"),
    "entropy": (),
    "actions": ("action_type",),
    "vm": ("state",),
    "create": ("snapshot_path", "mem_file_path"),
    "load": ("snapshot_path",),
    "mem_backend": ("backend_type", "backend_path"),
}
_CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("actions", "action_type"): ("FlushMetrics", "InstanceStart", "SendCtrlAltDel"),
    ("vm", "state"): ("Paused", "Resumed"),
    ("create", "snapshot_type"): ("Full", "Diff"),
    ("mem_backend", "backend_type"): ("File", "Uffd"),
}
_RANGES = {
    "vcpu_count": range(1, 33),
    "mem_size_mib": range(1, 1 << 20),
    "guest_cid": range(3, 1 << 32),
}
_OUTSIDE = {
    "vcpu_count": "The vCPU number is invalid! The vCPU number can only be 1 or an even number.",
    "mem_size_mib": "The memory size (MiB) is invalid.",
    "guest_cid": "Cannot create the vsock device: the guest's CID is reserved.",
}
_ROUTES = {
    ("PUT", "/machine-config"): "machine-config",
    ("PUT", "/boot-source"): "boot-source",
    ("PUT", "/vsock"): "vsock",
    ("PUT", "/entropy"): "entropy",
    ("PUT", "/actions"): "actions",
    ("PATCH", "/vm"): "vm",
    ("PUT", "/snapshot/create"): "create",
    ("PUT", "/snapshot/load"): "load",
}
_DRIVE = re.compile(r"/drives/([A-Za-z0-9_]+)")
_PROBLEM = "An error occurred when deserializing the json body of a request: "
_AFTER = "The requested operation is not supported after starting the microVM."
_BEFORE = "The requested operation is not supported before starting the microVM."
_LOAD_LATE = (
    "Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific"
    " resources."
)


@dataclass(slots=True)
class Rules:
    """What was asked so far, and so what may be asked next."""

    phase: Phase = Phase.NOT_STARTED
    is_tracked: bool = False
    machine: dict[str, Any] = field(default_factory=lambda: {"vcpu_count": 1, "mem_size_mib": 128})
    boot: dict[str, Any] | None = None
    drives: dict[str, dict[str, Any]] = field(default_factory=dict)
    vsock: dict[str, Any] | None = None
    has_entropy: bool = False
    _is_configured: bool = False

    def taken(self, method: str, path: str, body: object) -> Order | None:
        """What there is to do; None where remembering was all.

        Raises:
            RefusedError: the request is refused.
        """
        drive = _DRIVE.fullmatch(path) if method == "PUT" else None
        name = "drives" if drive else _ROUTES.get((method, path))
        if name is None:
            raise RefusedError(f"Invalid request method and/or path: {method} {path.lstrip('/')}.")
        found = _checked(name, body)
        match name:
            case "vm":
                return self._changed(found)
            case "create":
                return self._created(found)
            case "actions":
                return self._acted(found)
            case "load":
                return self._loaded(found)
            case _:
                self._configured(name, found, drive[1] if drive else "")
                return None

    def _configured(self, name: str, body: dict[str, Any], drive: str) -> None:
        if self.phase is not Phase.NOT_STARTED:
            raise RefusedError(_AFTER)
        self._is_configured = True
        match name:
            case "machine-config":
                self.machine, self.is_tracked = body, body.get("track_dirty_pages", False)
            case "boot-source":
                self.boot = body
            case "drives":
                _check_drive(drive, body["drive_id"])
                self.drives[drive] = body
            case "vsock":
                self.vsock = body
            case _:
                self.has_entropy = True

    def _changed(self, body: dict[str, Any]) -> Order:
        if self.phase is Phase.NOT_STARTED:
            raise RefusedError(_BEFORE)
        is_pause = body["state"] == "Paused"
        self.phase = Phase.PAUSED if is_pause else Phase.RUNNING
        return Order("pause" if is_pause else "resume", body)

    def _created(self, body: dict[str, Any]) -> Order:
        if self.phase is Phase.NOT_STARTED:
            raise RefusedError(_BEFORE)
        if self.phase is not Phase.PAUSED:
            raise RefusedError(
                "Create snapshot error: Cannot save the microVM state: Operation not allowed:"
                " save/restore unavailable while running"
            )
        kind = body.setdefault("snapshot_type", "Full")
        if kind == "Diff" and not self.is_tracked:
            raise RefusedError(
                "Create snapshot error: Diff snapshots are not allowed on this machine"
            )
        return Order("create", body)

    def _acted(self, body: dict[str, Any]) -> Order:
        if body["action_type"] != "InstanceStart":
            raise RefusedError("this fake knows InstanceStart only")
        if self.phase is not Phase.NOT_STARTED:
            raise RefusedError(_AFTER)
        if self.boot is None:
            raise RefusedError("Cannot start microvm without kernel configuration.")
        self.phase = Phase.RUNNING
        return Order("start", body)

    def _loaded(self, body: dict[str, Any]) -> Order:
        if self.phase is not Phase.NOT_STARTED:
            raise RefusedError(_AFTER)
        if self._is_configured:
            raise RefusedError(_LOAD_LATE)
        if ("mem_backend" in body) == ("mem_file_path" in body):
            raise RefusedError("either mem_backend or mem_file_path is to be given, and not both")
        backend = _checked("mem_backend", body.get("mem_backend", {}))
        if backend["backend_type"] != "File":
            raise RefusedError("this fake knows backends of type File only")
        self.is_tracked = body.get("track_dirty_pages", body.get("enable_diff_snapshots", False))
        self.phase = Phase.RUNNING if body.get("resume_vm") else Phase.PAUSED
        return Order("load", body)


def _check_drive(in_path: str, in_body: str) -> None:
    if in_path != in_body:
        raise RefusedError(
            f"The id from the path [{in_path}] does not match the id from the body [{in_body}]!"
        )


def _checked(name: str, body: object) -> dict[str, Any]:
    """A body with fields of its route only, each of its type and within its range.

    Raises:
        RefusedError: it is something else.
    """
    if body is None:
        raise RefusedError("Empty PUT request.")
    if not isinstance(body, dict):
        raise RefusedError(f"{_PROBLEM}invalid type, expected a map")
    fields = _FIELDS[name]
    for key, value in body.items():
        if key not in fields:
            known = ", ".join(f"`{each}`" for each in fields)
            raise RefusedError(f"{_PROBLEM}unknown field `{key}`, expected one of {known}.")
        _check_value(name, key, value)
    for key in _REQUIRED[name]:
        if key not in body:
            raise RefusedError(f"{_PROBLEM}missing field `{key}`.")
    return dict(body)


def _check_value(name: str, key: str, value: object) -> None:
    if type(value) not in _FIELDS[name][key]:
        raise RefusedError(f"{_PROBLEM}invalid type for `{key}`.")
    if value not in (choices := _CHOICES.get((name, key), (value,))):
        raise RefusedError(f"{_PROBLEM}unknown variant `{value}`, expected one of {choices}.")
    if type(value) is int and value not in _RANGES[key]:
        raise RefusedError(_OUTSIDE[key])
