"""What goes on without cert-manager where it is to make certificates, and what waits for it.

Its Secrets outlive their Certificates, and so the CRDs: pods that have theirs start and serve.
"""

from collections.abc import Collection, Iterable

from etude.common.api.kinds import EnvPool, RLRun
from etude.operator.conditions import Fact, no
from etude.operator.desired.certificates import Mode, Tls
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason

CERTIFICATE = "Certificate"
LOOK_AGAIN_S = 30.0
"""Its Certificates go with its CRDs: when those are back, no event names whose they were."""


def kinds(tls: Tls | None) -> tuple[str, ...]:
    """What the operator makes of cert-manager's kinds."""
    return (CERTIFICATE,) if tls is not None and tls.mode is Mode.CERT_MANAGER else ()


def is_absent(tls: Tls | None, served: Collection[str]) -> bool:
    """Whether it was chosen and is not there.

    Args:
        tls: the platform's choice.
        served: kinds of other projects that can be used.
    """
    return not set(kinds(tls)) <= set(served)


def problem(owner: RLRun | EnvPool, tls: Tls | None, served: Collection[str]) -> Fact | None:
    """Why a run or a pool cannot begin; one that has begun needs nothing but its Secrets."""
    if owner.status.resolved is not None or not is_absent(tls, served):
        return None
    message = (
        "cert-manager is not installed in this cluster, and the chart's value tls.mode chooses it:"
        " install it, and all goes on by itself, or choose another mode"
    )
    return no("Accepted", Reason.CERT_MANAGER_NOT_INSTALLED, message)


def possible(children: Iterable[Manifest], served: Collection[str]) -> list[Manifest]:
    """What can be made and compared now: no Certificates that the API server does not know."""
    return [each for each in children if each["kind"] != CERTIFICATE or CERTIFICATE in served]
