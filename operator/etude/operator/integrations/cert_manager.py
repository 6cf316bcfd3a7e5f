"""cert-manager as the source of certificates, and the behaviour without its CRDs.

Its Secrets outlive their Certificates and the CRDs: pods with a Secret start and serve.
"""

from collections.abc import Collection, Iterable

from etude.common.api.evaluation.status import EvalRunStatus
from etude.operator.builders.certificates import CertificateMode, PlatformTls
from etude.operator.builders.workload import Owner
from etude.operator.conditions import ConditionFact, false_condition
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason

CERTIFICATE = "Certificate"
RETRY_S = 30.0
"""Delay of the next pass: CRDs take Certificates with them, and return without an event."""


def created_kinds(tls: PlatformTls | None) -> tuple[str, ...]:
    """The kinds of cert-manager that the operator creates."""
    return (CERTIFICATE,) if tls is not None and tls.mode is CertificateMode.CERT_MANAGER else ()


def is_cert_manager_missing(tls: PlatformTls | None, served: Collection[str]) -> bool:
    """Return true if cert-manager is chosen but not served.

    Args:
        tls: the platform's choice.
        served: usable kinds of other projects.
    """
    return not set(created_kinds(tls)) <= set(served)


def cert_manager_problem(
    owner: Owner, tls: PlatformTls | None, served: Collection[str]
) -> ConditionFact | None:
    """The finding against an owner that cannot start; a started one only needs its Secrets."""
    # What is resolved once, or has begun, has its Secrets.
    status = owner.status
    is_started = status.start_time if isinstance(status, EvalRunStatus) else status.resolved
    if is_started is not None or not is_cert_manager_missing(tls, served):
        return None
    message = (
        "cert-manager is not installed in this cluster, and the chart's value tls.mode chooses it:"
        " install it, and this continues without further action, or choose another mode"
    )
    return false_condition("Accepted", Reason.CERT_MANAGER_NOT_INSTALLED, message)


def applicable_children(children: Iterable[Manifest], served: Collection[str]) -> list[Manifest]:
    """The children that can be applied now: without Certificates while their CRD is missing."""
    return [each for each in children if each["kind"] != CERTIFICATE or CERTIFICATE in served]
