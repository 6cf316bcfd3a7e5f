"""Status of a route: conditions, and counts of what serves."""

from collections.abc import Collection, Mapping, Sequence

from etude.common.api.kinds import Checkpoint, PolicyRoute
from etude.common.api.route.status import PolicyRouteStatus
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.clock import rfc3339
from etude.operator.conditions import (
    ACCEPTED,
    ConditionFact,
    false_condition,
    merge_conditions,
    true_condition,
)
from etude.operator.manifests import Manifest, is_deleting, is_true
from etude.operator.pod_failures import (
    CRASHES,
    PULL_FAILURES,
    unschedulable_message,
    waiting_message,
)
from etude.operator.reasons import Reason
from etude.operator.routes.releases import release_figures
from etude.v1 import release_pb2

PodsByRole = Mapping[str, Sequence[Manifest]]


def route_status(
    route: PolicyRoute,
    pods: PodsByRole,
    now: ClockReading,
    accepted: Sequence[ConditionFact],
    report: release_pb2.GetReleaseStatusResponse | None = None,
    checkpoints: Collection[Checkpoint] = (),
) -> PolicyRouteStatus:
    """The whole status of a route.

    Args:
        route: with its spec.
        pods: of its parts, by role.
        now: both clocks.
        accepted: condition Accepted, and that of the candidate if one is evaluated.
        report: of the feedback service, about releases.
        checkpoints: of the run.
    """
    gateways = route.spec.gateway.replicas
    channels = {
        name: f"{_num_ready(pods, name)}/{engines.replicas}"
        for name, engines in route.spec.channels.by_name.items()
    }
    facts = [
        *accepted,
        _available(pods),
        _feedback_available(pods),
        _degraded(pods),
    ]
    return route.status.model_copy(
        update={
            "observed_generation": route.metadata.generation,
            "phase": _phase(facts, is_started=route.status.resolved is not None),
            "gateways": f"{_num_ready(pods, names.GATEWAY)}/{gateways}",
            **release_figures(route.status, report, channels, checkpoints),
            "conditions": merge_conditions(
                facts,
                route.status.conditions,
                generation=route.metadata.generation,
                now=rfc3339(now.wall_s),
            ),
        }
    )


def _num_ready(pods: PodsByRole, role: str) -> int:
    return sum(is_true(pod, "Ready") and not is_deleting(pod) for pod in pods.get(role, ()))


def _available(pods: PodsByRole) -> ConditionFact:
    """Users get answers."""
    for role, what in (
        (names.STABLE, "engine of the stable channel"),
        (names.GATEWAY, "gateway"),
    ):
        if not _num_ready(pods, role):
            why = unschedulable_message(pods.get(role, ())) or f"no {what} is ready"
            return false_condition("Available", Reason.NOT_SERVING, why)
    return true_condition("Available", Reason.SERVING)


def _feedback_available(pods: PodsByRole) -> ConditionFact:
    """Feedback is taken; while it is not, clients keep it, and checkpoints stay as they are."""
    if _num_ready(pods, names.FEEDBACK):
        return true_condition("FeedbackAvailable", Reason.SERVING)
    why = unschedulable_message(pods.get(names.FEEDBACK, ())) or "the feedback service is not ready"
    return false_condition("FeedbackAvailable", Reason.NOT_SERVING, why)


def _degraded(pods: PodsByRole) -> ConditionFact:
    every = [pod for found in pods.values() for pod in found]
    for reasons, reason in (
        (PULL_FAILURES, Reason.IMAGE_PULL_FAILED),
        (CRASHES, Reason.CRASH_LOOPING),
    ):
        message = waiting_message(every, reasons)
        if message:
            return true_condition("Degraded", reason, message)
    return false_condition("Degraded", Reason.HEALTHY)


def _phase(facts: Sequence[ConditionFact], *, is_started: bool) -> str:
    fact = {each.type: each for each in facts}
    if not is_started:
        return "Pending"
    if fact["Degraded"].holds:
        return "Degraded"
    if not fact["Available"].holds:
        return "Starting"
    return "Ready" if fact[ACCEPTED].holds else "Degraded"
