"""What the operator asks of a cluster; reads come from caches, writes go to the API server."""

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol

from etude.common.errors import EtudeError, UnavailableError
from etude.operator.manifests import Manifest, Ref
from etude.operator.reasons import Reason

Listener = Callable[[Manifest], None]
"""Told of every object that changed, and of every one that is gone in its last known state."""


class ClusterError(UnavailableError):
    """The API server did not do what was asked; ask again."""

    reason: ClassVar[str] = Reason.CLUSTER_UNAVAILABLE


class ConflictError(ClusterError):
    """The object has changed since it was read."""

    reason = "Conflict"


class NameTakenError(EtudeError):
    """An object of this name exists and belongs to somebody else."""

    reason = Reason.NAME_CONFLICT

    def __init__(self, ref: Ref) -> None:
        super().__init__(f"{ref.kind} {ref.namespace}/{ref.name} exists and is not ours")
        self.ref = ref


class RefusedError(EtudeError):
    """The API server refuses this object for good: a schema, a policy, a missing right."""

    reason = Reason.REFUSED


class NamespaceClosingError(RefusedError):
    """Nothing can be created any more in a namespace that is going away."""

    reason = Reason.NAMESPACE_CLOSING


class Cluster(Protocol):
    """One cluster. A write that returns is visible to every later read of this process."""

    async def apply(self, manifest: Manifest, *, manager: str) -> Manifest:
        """Create or change an object so that it says this, and forget what we said before.

        One of a kind that is made once stays as it is.

        Raises:
            NameTakenError: the name belongs to an object with another controller.
            RefusedError: the object is not acceptable.
            ClusterError: try again.
        """
        ...

    async def delete(self, ref: Ref, *, uid: str, grace_s: int | None = None) -> None:
        """Ask this very object to go; one that is gone already is fine.

        Raises:
            ConflictError: it is still there; try again.
            RefusedError: it may not be deleted.
            ClusterError: try again.
        """
        ...

    async def replace_status(self, seen: Manifest, status: Manifest) -> Manifest:
        """Write the status of the object as it was seen.

        Raises:
            ConflictError: it has changed since.
        """
        ...

    async def set_finalizers(self, seen: Manifest, finalizers: Sequence[str]) -> None:
        """Write the finalizers of the object as it was seen.

        Raises:
            ConflictError: it has changed since.
        """
        ...

    async def adopt(self, seen: Manifest, metadata: Manifest) -> None:
        """Write owners, labels, annotations and finalizers of an object that somebody else made.

        Raises:
            ConflictError: it has changed since it was seen.
        """
        ...

    async def record(self, event: Manifest) -> None:
        """Publish a Kubernetes Event; one of the same name says the same and is left alone."""
        ...

    def get(self, ref: Ref) -> Manifest | None: ...
    def known(self, uid: str) -> Manifest | None:
        """The object of this uid."""
        ...

    def every(self, kind: str) -> Sequence[Manifest]: ...
    def owned(self, uid: str) -> Sequence[Manifest]:
        """Objects whose controller has this uid."""
        ...

    def address(self, namespace: str, target: str) -> str:
        """Where this process reaches `pod.service:port` of a namespace."""
        ...

    def served(self, kinds: Collection[str]) -> frozenset[str]:
        """Which of these kinds of other projects can be used; those that cannot are looked for."""
        ...

    def subscribe(self, listener: Listener) -> None: ...
