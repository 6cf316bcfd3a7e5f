"""Integrations: APIs of other projects that the operator can use and that specs ask for."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeGuard

from etude.common.api.kinds import EnvPool, RLRun
from etude.common.api.pool.backend import Backend
from etude.operator.builders.platform import Platform
from etude.operator.conditions import ConditionFact, false_condition
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
    missing_reason: Reason


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


class IntegrationNeed(NamedTuple):
    """An integration that a field asks for."""

    integration: Integration
    field: str


def enabled_kinds(platform: Platform) -> tuple[str, ...]:
    """The kinds of all integrations that the operator was installed with."""
    enabled = [each for each in INTEGRATIONS if each.name in platform.integrations]
    return (
        *(kind for each in enabled for kind in each.kinds),
        *cert_manager.created_kinds(platform.tls),
    )


def needed_kinds(needs: Iterable[IntegrationNeed]) -> set[str]:
    """The kinds of other projects that these needs include."""
    return {cert_manager.CERTIFICATE, *(kind for each in needs for kind in each.integration.kinds)}


def run_needs(run: RLRun) -> Iterator[IntegrationNeed]:
    """The integrations that a run asks for."""
    scheduling = run.spec.scheduling
    if scheduling.kind == "JobSet":
        asks = "admission" if scheduling.workload == "Auto" else "workload"
        yield IntegrationNeed(JOBSET, f"spec.scheduling.{asks}")
    if scheduling.kind == "RayCluster":
        yield IntegrationNeed(KUBERAY, "spec.scheduling.workload")
    gang = scheduling.gang
    if gang is not None and gang.provider == "Volcano":
        yield IntegrationNeed(VOLCANO, "spec.scheduling.gang.provider")
    inference = run.spec.roles.inference
    if inference is not None and inference.gateway is not None:
        yield IntegrationNeed(GATEWAY, "spec.roles.inference.gateway")
    if scheduling.queue_name is not None:
        yield IntegrationNeed(KUEUE, "spec.scheduling.queueName")


def pool_needs(pool: EnvPool) -> Iterator[IntegrationNeed]:
    """The integrations that a pool asks for."""
    if pool.spec.backend is Backend.AGENT_SANDBOX:
        yield IntegrationNeed(AGENT_SANDBOX, "spec.backend")


def is_api_missing(fact: ConditionFact | None) -> TypeGuard[ConditionFact]:
    """Return true for the problem of a missing API, which ends when that is installed."""
    return fact is not None and fact.reason in {each.missing_reason for each in INTEGRATIONS}


def affects_pods(fact: ConditionFact) -> bool:
    """Return true if the missing API creates pods or admits them."""
    return fact.reason in {each.missing_reason for each in (JOBSET, KUEUE, KUBERAY)}


def need_problem(
    need: IntegrationNeed, enabled: Collection[str], served: Collection[str]
) -> ConditionFact | None:
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
        return false_condition("Accepted", Reason.FEATURE_DISABLED, message)
    if not set(integration.kinds) <= set(served):
        message = (
            f"{field}: {integration.product} is not installed in this cluster: install it, and"
            " this continues without further action, or remove the field"
        )
        return false_condition("Accepted", integration.missing_reason, message)
    return None
