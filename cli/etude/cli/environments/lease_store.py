"""Lease store: this user's leases in private files, and those that a local run holds."""

import base64
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from etude.common import atomic
from etude.common.errors import Problem, UserError
from etude.v1 import environments_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLease:
    """One lease, and where it came from."""

    lease: environments_pb2.Lease
    template: str
    broker: str = ""
    """host:port of the broker that renews it; empty where this command does not renew it."""
    ttl_s: int = 0

    @property
    def name(self) -> str:
        """Name of the environment: the id of its lease."""
        return self.lease.lease_id

    @property
    def left_s(self) -> float:
        """Seconds until the lease ends, unless renewed."""
        return self.lease.expires_unix_ms / 1000 - time.time()


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """Folder of the leases: $ETUDE_ENVIRONMENTS, or the user's folder for state."""
    state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(env.get("ETUDE_ENVIRONMENTS") or Path(state) / "etude" / "environments")


def store_lease(environment: EnvironmentLease) -> None:
    """Store a lease, readable by this user alone: it holds tokens."""
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(
        {
            "lease": base64.b64encode(environment.lease.SerializeToString()).decode(),
            "template": environment.template,
            "broker": environment.broker,
            "ttl_s": environment.ttl_s,
        }
    )
    atomic.write_text(place / f"{environment.name}.json", text, mode=0o600)


def remove_lease(name: str) -> None:
    """Drop a lease that has ended."""
    (folder() / f"{name}.json").unlink(missing_ok=True)


def stored_leases() -> list[EnvironmentLease]:
    """Every stored lease that has not expired, by name."""
    found = []
    for path in sorted(folder().glob("*.json")):
        environment = _read(path, "lease")
        if environment is not None and environment.left_s > 0:
            found.append(environment)
    return found


def run_leases(run_folder: Path) -> list[EnvironmentLease]:
    """The leases that the hosts of a local run hold for its rollouts."""
    paths = run_folder.glob("scratch/*/leases/*/state.json")
    return [found for path in sorted(paths) if (found := _read(path, "held")) is not None]


def find_environment(name: str, environments: Iterable[EnvironmentLease]) -> EnvironmentLease:
    """The environment whose name is this or begins with it.

    Raises:
        UserError: there is none, or more than one.
    """
    everything = list(environments)
    found = [e for e in everything if e.name == name] or list(_with_prefix(name, everything))
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} environments begin with this" if found else "no environment of yours"
    fix = "give more letters" if found else "etude env ls shows yours; etude env create makes one"
    raise UserError(Problem("NotFound", what, name or "environment", fix))


def _with_prefix(name: str, environments: Iterable[EnvironmentLease]) -> Iterator[EnvironmentLease]:
    return (each for each in environments if name and each.name.startswith(name))


def _read(path: Path, key: str) -> EnvironmentLease | None:
    """The lease in a file; None for a half-written or foreign file."""
    try:
        raw = json.loads(path.read_bytes())
        data = base64.b64decode(raw[key])
        if key == "held":
            lease = environments_pb2.HeldLease.FromString(data).lease
            return EnvironmentLease(lease=lease, template=str(raw["template"]))
        return EnvironmentLease(
            lease=environments_pb2.Lease.FromString(data),
            template=str(raw["template"]),
            broker=str(raw["broker"]),
            ttl_s=int(raw["ttl_s"]),
        )
    except (OSError, ValueError, TypeError, KeyError, DecodeError):
        return None
