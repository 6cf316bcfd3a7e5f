"""Decisions and their actions: the effects that a decision may list."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from etude.common.api.checkpoint.status import CheckpointStatus
from etude.common.api.status_types import StatusModel
from etude.operator.manifests import Manifest, Ref
from etude.operator.remotes.release_order import ReleaseOrder
from etude.operator.remotes.report_store import ReportPosition
from etude.v1 import run_pb2

S = TypeVar("S", bound=StatusModel)


class ClockReading(NamedTuple):
    """One reading of both clocks."""

    wall_s: float
    """For display and comparison with times in objects; may jump backwards."""
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Create or change an object."""

    manifest: Manifest
    manager: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete an object."""

    ref: Ref
    uid: str
    grace_s: int | None = None
    """A pod's termination grace period; its own unless set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFinalizers:
    """Set the finalizers of an object as it was observed."""

    observed: Manifest
    finalizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Take over an object that a user made, as it was observed."""

    observed: Manifest
    metadata: Manifest
    """Its owners, labels, annotations and finalizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRequest:
    """Write the saved checkpoint into the status of its request."""

    ref: Ref
    uid: str
    status: CheckpointStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """Write the status of another controller's object, as it was observed."""

    observed: Manifest
    status: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand:
    """Send a command to the run's controller."""

    target: str
    request: run_pb2.CommandRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHosts:
    """Stop placements on pool hosts, and delete those that all brokers report empty."""

    brokers: tuple[str, ...]
    hosts: Mapping[Ref, str]
    """Uid of each host's pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBrokers:
    """Give brokers the newest spec of their pool, which their mounted file gets a minute later."""

    targets: tuple[str, ...]
    pool_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Publish a Kubernetes Event about the object."""

    name: str
    """Identifies the occurrence: repeated recordings have the same name."""
    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AckReport:
    """Acknowledge all reports of the controller up to a position."""

    position: ReportPosition


Action = (
    Apply
    | Delete
    | SetFinalizers
    | Adopt
    | CompleteRequest
    | WriteStatus
    | SendCommand
    | ReleaseOrder
    | DrainHosts
    | UpdateBrokers
    | RecordEvent
    | AckReport
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[S]):
    """Actions and new status of one object."""

    status: S
    actions: tuple[Action, ...] = ()
    """Carried out in order, before the status is written."""
    requeue_after_s: float | None = None
    """Delay until the next pass even without an event."""
    is_transient: bool = False
    """Whether the status is transient: written only once it has lasted."""
