"""Replies of an API server, translated into errors."""

from typing import Any, NamedTuple

from etude.operator.cluster.api import (
    ClusterError,
    ConflictError,
    NamespaceClosingError,
    RefusedError,
)
from etude.operator.manifests import Manifest

_FOR_GOOD = {400, 403, 404, 405, 413, 415, 422}
_UNREADABLE = ("failed to convert new object", "failed to create typed patch object")
"""Messages with which server-side apply, as an internal error, rejects a manifest that does not fit
its schema: a bad quantity, text for a number, an unknown field."""


class Reply(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: dict[str, Any]


def accepted(reply: Reply, what: str) -> Manifest:
    """The object in the answer to a write.

    Raises:
        ConflictError: it has changed since it was read.
        NamespaceClosingError: its namespace is terminating.
        RefusedError: it is not valid.
        ClusterError: a retry may succeed.
    """
    if reply.status < 300:
        return reply.body
    message = f"{what}: {reply.body.get('message', reply.status)}"
    causes = (reply.body.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        raise NamespaceClosingError(message)
    if reply.status == 409:
        raise ConflictError(message)
    if reply.status in _FOR_GOOD or _is_no_such_object(reply):
        raise RefusedError(message)
    raise ClusterError(message)


def _is_no_such_object(reply: Reply) -> bool:
    message = str(reply.body.get("message"))
    return reply.status == 500 and any(words in message for words in _UNREADABLE)


def answered(reply: Reply, what: str) -> Manifest:
    """The object in the answer to a read, a list or a renewal.

    Every error may be retried: an API server that starts forbids everything until it has read its
    roles.

    Raises:
        ClusterError: any error.
    """
    try:
        return accepted(reply, what)
    except RefusedError as refusal:
        raise ClusterError(str(refusal)) from refusal
