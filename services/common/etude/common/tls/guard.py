"""Turns a caller away that is not on the list."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from etude.common.errors import ForbiddenError
from etude.common.tls import metrics
from etude.common.tls.callers import refusal
from etude.common.tls.identity import Identity, identities

NAMES = "x509_subject_alternative_name"
"""Under which gRPC shows the names of a verified client certificate."""


class Call(Protocol):
    """What we ask a call about."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What the handshake proved."""
        ...


def caller_of(call: Call) -> Identity | None:
    """Who calls, as the verified certificate says; None if it names nobody of ours."""
    names = [name.decode(errors="replace") for name in call.auth_context().get(NAMES, ())]
    found = identities(names)
    return found[0] if len(found) == 1 else None


def admit(call: Call, callee: Identity, method: str) -> None:
    """Let a call pass, or not.

    Raises:
        ForbiddenError: the caller may not make it.
    """
    caller = caller_of(call)
    why = (
        "the caller's certificate does not name one identity of ours"
        if caller is None
        else refusal(caller, callee, method)
    )
    if why:
        metrics.REFUSED.labels("server").inc()
        raise ForbiddenError(why)
