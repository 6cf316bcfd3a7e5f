"""Integrations: APIs of other projects that the operator can use and that specs ask for."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeGuard

from etude.common.api.kinds import EnvPool, RLRun
from etude.common.api.pool.backend import Backend
from etude.operator.builders.run import Platform
from etude.operator.conditions import Fact, no
from etude.operator.integrations import cert_manager
from etude.operator.reasons import Reason


class Integration(NamedTuple):
    """An API of another project."""

    name: str
    """Its key under `integrations` in the chart's values."""
    product: str
    """Its display name."""
    kinds: tuple[str, ...]
    """Kinds that the operator reads or writes; all of them must be served."""
    absent: Reason


JOBSET = Integration("jobset", "JobSet", ("JobSet",), Reason.JOBSET_NOT_INSTALLED)
KUEUE = Integration(
    "kueue",
    "Kueue",
    ("Workload", "ResourceFlavor", "WorkloadPriorityClass", "PriorityClass"),
    Reason.KUEUE_NOT_INSTALLED,
)
KUBERAY = Integration("kuberay", "KubeRay", ("RayCluster",), Reason.KUBERAY_NOT_INSTALLED)
GATEWAY = Integration("gatewayApi", "Gateway API", ("HTTPRoute",), Reason.GATEWAY_API_NOT_INSTALLED)
AGENT_SANDBOX = Integration(
    "agentSandbox",
    "agent-sandbox",
    ("Sandbox", "SandboxTemplate"),
    Reason.AGENT_SANDBOX_NOT_INSTALLED,
)
VOLCANO = Integration("volcano", "Volcano", ("PodGroup",), Reason.VOLCANO_NOT_INSTALLED)
INTEGRATIONS = (JOBSET, KUEUE, KUBERAY, GATEWAY, AGENT_SANDBOX, VOLCANO)


class Need(NamedTuple):
    """An integration that a field asks for."""

    integration: Integration
    field: str


def kinds(platform: Platform) -> tuple[str, ...]:
    """The kinds of all integrations that the operator was installed with."""
    enabled = [each for each in INTEGRATIONS if each.name in platform.integrations]
    return (*(kind for each in enabled for kind in each.kinds), *cert_manager.kinds(platform.tls))


def asked(needs: Iterable[Need]) -> set[str]:
    """The kinds of other projects that these needs include."""
    return {cert_manager.CERTIFICATE, *(kind for each in needs for kind in each.integration.kinds)}


def needs(run: RLRun) -> Iterator[Need]:
    """The integrations that a run asks for."""
    scheduling = run.spec.scheduling
    if scheduling.kind == "JobSet":
        asks = "admission" if scheduling.workload == "Auto" else "workload"
        yield Need(JOBSET, f"spec.scheduling.{asks}")
    if scheduling.kind == "RayCluster":
        yield Need(KUBERAY, "spec.scheduling.workload")
    gang = scheduling.gang
    if gang is not None and gang.provider == "Volcano":
        yield Need(VOLCANO, "spec.scheduling.gang.provider")
    inference = run.spec.roles.inference
    if inference is not None and inference.gateway is not None:
        yield Need(GATEWAY, "spec.roles.inference.gateway")
    if scheduling.queue_name is not None:
        yield Need(KUEUE, "spec.scheduling.queueName")


def pool_needs(pool: EnvPool) -> Iterator[Need]:
    """The integrations that a pool asks for."""
    if pool.spec.backend is Backend.AGENT_SANDBOX:
        yield Need(AGENT_SANDBOX, "spec.backend")


def is_missing(fact: Fact | None) -> TypeGuard[Fact]:
    """Return true for the problem of a missing API, which ends when that is installed."""
    return fact is not None and fact.reason in {each.absent for each in INTEGRATIONS}


def hides_pods(fact: Fact) -> bool:
    """Return true if the missing API creates pods or admits them."""
    return fact.reason in {each.absent for each in (JOBSET, KUEUE, KUBERAY)}


def problem(need: Need, enabled: Collection[str], served: Collection[str]) -> Fact | None:
    """The problem of a need that is not met.

    Args:
        need: an integration that a run or a pool asks for.
        enabled: names of the integrations that the operator was installed with.
        served: kinds that the API server serves.
    """
    integration, field = need
    if integration.name not in enabled:
        message = (
            f"{field}: the operator may not use {integration.product}: set the chart's value"
            f" integrations.{integration.name}.enabled to true, or remove the field"
        )
        return no("Accepted", Reason.FEATURE_DISABLED, message)
    if not set(integration.kinds) <= set(served):
        message = (
            f"{field}: {integration.product} is not installed in this cluster: install it, and"
            " this continues without further action, or remove the field"
        )
        return no("Accepted", integration.absent, message)
    return None
