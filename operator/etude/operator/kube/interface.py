"""Interface of a cluster: reads come from the watch cache, writes go to the API server."""

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol

from etude.common.errors import EtudeError, UnavailableError
from etude.operator.manifests import M, Manifest, Ref, parse_object
from etude.operator.reasons import Reason

Listener = Callable[[Manifest], None]
"""Receives every changed object, and every deleted one in its last known state."""


class ClusterError(UnavailableError):
    """The API server did not carry out a request; retry."""

    reason: ClassVar[str] = Reason.CLUSTER_UNAVAILABLE


class ConflictError(ClusterError):
    """The object has changed since it was read."""

    reason = "Conflict"


class NameTakenError(EtudeError):
    """An object of this name exists and has another controller."""

    reason = Reason.NAME_CONFLICT

    def __init__(self, ref: Ref) -> None:
        super().__init__(f"{ref.kind} {ref.namespace}/{ref.name} exists and has another owner")
        self.ref = ref


class ApiRejectedError(EtudeError):
    """The API server rejects this object permanently: a schema, a policy, a missing right."""

    reason = Reason.REFUSED


class NamespaceClosingError(ApiRejectedError):
    """Nothing can be created in a namespace that is terminating."""

    reason = Reason.NAMESPACE_CLOSING


class Cluster(Protocol):
    """One cluster. A write that returns is visible to every later read of this process."""

    async def apply(self, manifest: Manifest, *, manager: str) -> Manifest:
        """Create or change an object so that it has these fields and no other of this manager.

        An object of a kind that is never changed stays as it is.

        Raises:
            NameTakenError: the name belongs to an object with another controller.
            ApiRejectedError: the object is not valid.
            ClusterError: retry.
        """
        ...

    async def delete(self, ref: Ref, *, uid: str, grace_s: int | None = None) -> None:
        """Delete the object of this uid, if it exists.

        Raises:
            ConflictError: it still exists; retry.
            ApiRejectedError: it may not be deleted.
            ClusterError: retry.
        """
        ...

    async def replace_status(self, seen: Manifest, status: Manifest) -> Manifest:
        """Write the status of the object as it was observed.

        Raises:
            ConflictError: it has changed since.
        """
        ...

    async def set_finalizers(self, seen: Manifest, finalizers: Sequence[str]) -> None:
        """Write the finalizers of the object as it was observed.

        Raises:
            ConflictError: it has changed since.
        """
        ...

    async def adopt(self, seen: Manifest, metadata: Manifest) -> None:
        """Write owners, labels, annotations and finalizers of an object that a user made.

        Raises:
            ConflictError: it has changed since it was observed.
        """
        ...

    async def record_event(self, event: Manifest) -> None:
        """Publish a Kubernetes Event, unless one of its name exists."""
        ...

    def get(self, ref: Ref) -> Manifest | None: ...
    def get_by_uid(self, uid: str) -> Manifest | None: ...

    def list_objects(self, kind: str) -> Sequence[Manifest]: ...
    def list_owned(self, uid: str) -> Sequence[Manifest]:
        """Objects that the object of this uid controls."""
        ...

    def address(self, namespace: str, target: str) -> str:
        """Address under which this process reaches `pod.service:port` of a namespace."""
        ...

    def usable_kinds(self, kinds: Collection[str]) -> frozenset[str]:
        """The usable ones of these kinds of other projects; discovery looks for the others."""
        ...

    def subscribe(self, listener: Listener) -> None: ...


def read_object(cluster: Cluster, model: type[M], namespace: str, name: str) -> M | None:
    """Read an object of our kinds; None if it is missing, or has fields that cannot be read."""
    return parse_object(model, cluster.get(Ref(model.__name__, namespace, name)))
