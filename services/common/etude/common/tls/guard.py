"""RPC authorization of incoming calls."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from etude.common.errors import ForbiddenError
from etude.common.tls import metrics
from etude.common.tls.callers import refusal
from etude.common.tls.identity import Identity, identities

NAMES = "x509_subject_alternative_name"
"""Property of gRPC with the names of a verified client certificate."""


class Call(Protocol):
    """The part of a call's context that authorization reads."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Names that the handshake proved."""
        ...


def caller_of(call: Call) -> Identity | None:
    """Identity of the caller in its verified certificate; None if it names none or several."""
    names = [name.decode(errors="replace") for name in call.auth_context().get(NAMES, ())]
    found = identities(names)
    return found[0] if len(found) == 1 else None


def admit(call: Call, callee: Identity, method: str) -> None:
    """Authorize a call, or refuse it.

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
