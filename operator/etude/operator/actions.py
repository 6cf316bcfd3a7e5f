"""Decisions, in terms of what they may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from etude.common.api.checkpoint_status import CheckpointStatus
from etude.common.api.status import Status
from etude.operator.manifests import Manifest, Ref
from etude.operator.reports.latest import Position
from etude.v1 import run_pb2

S = TypeVar("S", bound=Status)


class Moment(NamedTuple):
    """One reading of both clocks."""

    wall_s: float
    """To show, and to compare with times in objects; never trusted to only grow."""
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Create or change an object."""

    manifest: Manifest
    manager: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Ask an object to go."""

    ref: Ref
    uid: str
    grace_s: int | None = None
    """A pod's time to end in order; its own unless set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalizers:
    """Set the finalizers of an object as it was seen."""

    seen: Manifest
    finalizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Take over an object that a user made, as it was seen."""

    seen: Manifest
    metadata: Manifest
    """Its owners, labels, annotations and finalizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fulfil:
    """Write into a checkpoint that was asked for what it holds."""

    ref: Ref
    uid: str
    status: CheckpointStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Write the status of an object of somebody else, as it was seen."""

    seen: Manifest
    status: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Hand a command to the run's controller."""

    target: str
    request: run_pb2.CommandRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacate:
    """Have brokers give these nodes nothing more, and delete those that all of them call empty."""

    brokers: tuple[str, ...]
    nodes: Mapping[Ref, str]
    """Uids of the pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Publish a Kubernetes Event about the object."""

    name: str
    """The same happening has the same name, however often it is told."""
    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtWith:
    """Everything that the controller told up to here has been acted on."""

    position: Position


Action = Apply | Delete | Finalizers | Adopt | Fulfil | Tell | Order | Vacate | Note | DealtWith


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[S]):
    """What to do about one object, and what to say about it."""

    status: S
    actions: tuple[Action, ...] = ()
    """Performed in order, before the status is written."""
    requeue_after_s: float | None = None
    """Look again after this, even if nothing happens."""
    is_passing: bool = False
    """Whether what the status says is on its way to something else: told once it has held."""
