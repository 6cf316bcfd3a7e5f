"""RPC authorization: the identities that may call each method, and the check of a call."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import NamedTuple, Protocol

from etude.common.errors import ForbiddenError
from etude.common.tls import metrics
from etude.common.tls.identity import (
    BROKER,
    EDGE,
    EVALUATOR,
    GATEWAY,
    NODE,
    OPERATOR,
    REWARDS,
    TRAINER,
    Identity,
    identities,
)


class Bond(Enum):
    """Scope that a caller must share with the callee."""

    DOMAIN = auto()
    """The trust domain alone."""
    RUN = auto()
    """Namespace and run."""
    POOL = auto()
    """Namespace and pool."""
    ROUTE = auto()
    """Namespace and route."""
    USE = auto()
    """Namespace; a run's own pool serves that run alone."""


class AllowedCaller(NamedTuple):
    """A role that may call, and the scope that it must share with the callee."""

    role: str
    bond: Bond


_OPERATOR = (AllowedCaller(OPERATOR, Bond.DOMAIN),)
_DRIVERS = (AllowedCaller(TRAINER, Bond.RUN), AllowedCaller(EVALUATOR, Bond.RUN))
_GATEWAY = (AllowedCaller(GATEWAY, Bond.ROUTE),)
_BORROWER = (AllowedCaller(TRAINER, Bond.USE),)
"""Of engines that belong to no run: those of routes, which know the run that they are lent to."""
_NODE = (AllowedCaller(NODE, Bond.POOL),)
_BROKER = (AllowedCaller(BROKER, Bond.POOL),)
_CLIENTS = (
    AllowedCaller(TRAINER, Bond.USE),
    AllowedCaller(EVALUATOR, Bond.USE),
    AllowedCaller(REWARDS, Bond.USE),
    AllowedCaller(EDGE, Bond.POOL),
)

ALLOWED_CALLERS: Mapping[str, tuple[AllowedCaller, ...]] = {
    "etude.v1.RunService": _OPERATOR,
    "etude.v1.PoolService": _OPERATOR,
    "etude.v1.ReleaseService": _OPERATOR,
    "etude.v1.TurnKeyService": _GATEWAY,
    "etude.v1.FeedbackService": _GATEWAY,
    "etude.v1.InferenceService": (*_DRIVERS, *_GATEWAY),
    "etude.v1.InferenceService/Generate": (*_DRIVERS, *_GATEWAY, *_BORROWER),
    "etude.v1.WeightService": _DRIVERS,
    "etude.v1.WeightService/GetWeightStatus": (*_DRIVERS, *_GATEWAY, *_BORROWER),
    "etude.v1.WeightService/SetLending": _GATEWAY,
    "etude.v1.RewardService": _DRIVERS,
    "etude.v1.EnvBrokerService": _CLIENTS,
    "etude.v1.EnvBrokerService/Heartbeat": _NODE,
    "etude.v1.BrokerPeerService": _BROKER,
    "etude.v1.EnvBrokerService/DescribePool": _NODE,
    "etude.v1.EnvBrokerService/GrantReads": _NODE,
    "etude.v1.EnvNodeService": _CLIENTS,
    "etude.v1.EnvNodeService/OpenEnvironments": _BROKER,
    "etude.v1.EnvNodeService/CloseEnvironments": _BROKER,
    "etude.v1.EnvNodeService/PreemptEnvironments": _BROKER,
    "etude.v1.EnvNodeService/ResumePreempted": _BROKER,
    "etude.v1.EnvAccessService": _CLIENTS,
    "etude.v1.EnvStateService": _CLIENTS,
}
"""By service, or by method where one differs. What is not listed is refused."""

OPEN = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})
"""Open to every certificate of the trust domain."""


def refusal(caller: Identity, callee: Identity, method: str) -> str:
    """Reason for which a caller may not call a method of a callee; empty if it may.

    Args:
        caller: from its certificate.
        callee: the identity that is called.
        method: as gRPC has it, /package.Service/Method.
    """
    if caller.domain != callee.domain:
        return f"{caller.uri} is of another trust domain than {callee.domain}"
    name = method.removeprefix("/")
    service = name.partition("/")[0]
    if service in OPEN:
        return ""
    allowed = ALLOWED_CALLERS.get(name) or ALLOWED_CALLERS.get(service, ())
    if any(_fits(caller, callee, each) for each in allowed):
        return ""
    roles = " or ".join(f"{each.role} ({each.bond.name.lower()})" for each in allowed) or "nobody"
    return f"{caller.uri} may not call {name} of {callee.uri}: that is for {roles}"


def _fits(caller: Identity, callee: Identity, allowed: AllowedCaller) -> bool:
    if allowed.bond is Bond.DOMAIN:
        return caller.role == allowed.role
    if caller.namespace != callee.namespace or caller.role not in {"", allowed.role}:
        return False
    if not caller.role or not callee.role:
        return True  # one certificate for a namespace cannot tell its holders apart
    if allowed.bond is Bond.USE:
        return callee.run in {"", caller.run}
    ours, theirs = (getattr(each, _SCOPES[allowed.bond]) for each in (callee, caller))
    return bool(ours) and ours == theirs


_SCOPES = {Bond.RUN: "run", Bond.POOL: "pool", Bond.ROUTE: "route"}
"""Part of an identity that both must have."""

NAMES = "x509_subject_alternative_name"
"""Property of gRPC with the names of a verified client certificate."""


class AuthenticatedCall(Protocol):
    """The part of a call's context that authorization reads."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Names that the handshake proved."""
        ...


def caller_of(call: AuthenticatedCall) -> Identity | None:
    """Identity of the caller in its verified certificate; None if it names none or several."""
    names = [name.decode(errors="replace") for name in call.auth_context().get(NAMES, ())]
    found = identities(names)
    return found[0] if len(found) == 1 else None


def authorize(call: AuthenticatedCall, callee: Identity, method: str) -> None:
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
