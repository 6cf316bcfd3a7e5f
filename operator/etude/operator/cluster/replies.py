"""What the answer of an API server means."""

from typing import Any, NamedTuple

from etude.operator.cluster.api import (
    ClusterError,
    ConflictError,
    NamespaceClosingError,
    RefusedError,
)
from etude.operator.manifests import Manifest


class Reply(NamedTuple):
    """What the API server answered."""

    status: int
    body: dict[str, Any]


def accepted(reply: Reply, what: str) -> Manifest:
    """The object in the answer to a write.

    Raises:
        ConflictError: it has changed since it was read.
        NamespaceClosingError: its namespace is going away.
        RefusedError: it is not acceptable.
        ClusterError: anything that may be different next time.
    """
    if reply.status < 300:
        return reply.body
    message = f"{what}: {reply.body.get('message', reply.status)}"
    causes = (reply.body.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        raise NamespaceClosingError(message)
    if reply.status == 409:
        raise ConflictError(message)
    if reply.status in {400, 403, 404, 405, 413, 415, 422}:
        raise RefusedError(message)
    raise ClusterError(message)


def answered(reply: Reply, what: str) -> Manifest:
    """The object in the answer to a read, a list or a renewal, which nobody refuses for good.

    An API server that has just started forbids everything until it has read its roles.

    Raises:
        ClusterError: anything but an object.
    """
    try:
        return accepted(reply, what)
    except RefusedError as refusal:
        raise ClusterError(str(refusal)) from refusal
