"""Kind: one entry of the kind registry, with everything that the controller needs of a kind."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from etude.common.api.kinds import ApiObject
from etude.common.api.schema import crd
from etude.common.api.status_types import StatusModel
from etude.operator.actions import Action, ClockReading, Decision
from etude.operator.builders.platform import Platform
from etude.operator.conditions import ConditionFact
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref
from etude.operator.remotes.followers import Followers
from etude.operator.remotes.report_store import ReportStore

R = TypeVar("R", bound=ApiObject)
S = TypeVar("S", bound=StatusModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindContext:
    """The parts of an operator that all kinds share."""

    cluster: Cluster
    reports: ReportStore
    followers: Followers


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInput:
    """Input of one pass, in addition to the object."""

    now: ClockReading
    platform: Platform
    problem: ConditionFact | None = None
    """Why the last decision about the object was not carried out."""
    rejected: frozenset[Ref] = frozenset()
    """Objects whose changes the API server rejected in the last pass."""


class KindReconciler(Generic[R, S]):
    """Observes and decides about the objects of one kind; may keep state between passes."""

    def decide(self, resource: R, manifest: Manifest, inputs: PassInput) -> Decision[S]:
        """Observe an object and decide about it; from caches alone, without waiting."""
        raise NotImplementedError

    def reserve(self, actions: Sequence[Action]) -> contextlib.AbstractContextManager[None]:
        """Reserve what the actions use while they are carried out."""
        return contextlib.nullcontext()

    def record_apply(self, manifest: Manifest) -> None:
        """Count a child that was created or changed."""

    def forget(self, key: Ref, uid: str) -> None:
        """Drop the state and the metrics of a deleted object."""


def _no_owner(_: Manifest) -> str | None:
    return None


def _no_references(_: Manifest) -> Iterable[Ref]:
    return ()


def _unchanged(manifest: Manifest, _: float) -> Manifest:
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceKind(Generic[R, S]):
    """One kind of the operator: a module of the kind's folder has its instance."""

    definition: crd.CrdKind
    """CustomResourceDefinition: names, rules, printer columns."""
    model: type[R]
    status: type[S]
    reconciler: Callable[[KindContext], KindReconciler[R, S]]
    """Creates the reconciler of this kind for one operator."""
    children: Callable[[R, Platform], Iterable[Manifest]] | None = None
    """Builds the children of a new object, to be rendered."""
    owner_of: Callable[[Manifest], str | None] = _no_owner
    """Name of the object of this kind that a child belongs to, from the child's labels."""
    references: Callable[[Manifest], Iterable[Ref]] = _no_references
    """Objects that an object of this kind names: their changes queue it."""
    restore: Callable[[Manifest, float], Manifest] = _unchanged
    """The object from the local runtime's state file, with the time of that file, as a new runtime
    continues it."""

    @property
    def name(self) -> str:
        return self.definition.name
