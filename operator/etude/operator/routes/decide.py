"""Decision about one route: its parts and its status."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from etude.common.api.kinds import ApiObject, Checkpoint, EvalRun, PolicyRoute, RLRun
from etude.common.api.route.status import PolicyRouteStatus
from etude.common.api.status_types import Resolved
from etude.operator import names
from etude.operator.actions import Action, Apply, ClockReading, Decision, Delete
from etude.operator.builders.addresses import PORTS
from etude.operator.builders.platform import Platform
from etude.operator.builders.route import route_children
from etude.operator.conditions import ACCEPTED, ConditionFact, true_condition
from etude.operator.integrations import cert_manager
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import (
    Manifest,
    Ref,
    is_applied,
    is_deleting,
    is_true,
    labels,
    ref,
    uid,
)
from etude.operator.reasons import Reason
from etude.operator.remotes.report_store import ReportStore
from etude.operator.routes import requests
from etude.operator.routes.acceptance import route_problem
from etude.operator.routes.proposals import (
    POLL_S,
    CandidateStep,
    ReleaseInputs,
    next_candidate,
)
from etude.operator.routes.status import route_status

M = TypeVar("M", bound=ApiObject)

_PARTS = {"Service", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"}
"""Kinds of children that come and go with a channel; ConfigMaps stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRoute:
    """Run, children and pods of a route, from caches alone."""

    run: RLRun | None = None
    """The run that it names; None if it is missing or its spec is invalid."""
    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    pods: Mapping[str, Sequence[Manifest]] = field(default_factory=dict)
    """By role."""
    served: frozenset[str] = frozenset()
    """Served kinds of other projects."""
    releases: ReleaseInputs = field(default_factory=ReleaseInputs)
    """Feedback service, checkpoints and evaluations."""
    problem: ConditionFact | None = None
    """The rejection that kept the last decision from being carried out."""


def observe_route(
    cluster: Cluster,
    reports: ReportStore,
    route: PolicyRoute,
    problem: ConditionFact | None,
    platform: Platform,
) -> ObservedRoute:
    """Everything that a decision about this route depends on."""
    namespace, name = route.metadata.namespace, route.metadata.name
    pods: dict[str, list[Manifest]] = {}
    # Pods of a Deployment belong to its ReplicaSets, which nobody watches.
    for pod in cluster.list_objects("Pod"):
        found = labels(pod)
        if found.get(names.ROUTE) == name and ref(pod).namespace == namespace:
            pods.setdefault(found.get(names.ROLE, ""), []).append(pod)
    return ObservedRoute(
        run=_find_run(cluster, route),
        children={ref(m): m for m in cluster.list_owned(route.metadata.uid)},
        pods=pods,
        served=cluster.usable_kinds(cert_manager.created_kinds(platform.tls)),
        releases=ReleaseInputs(
            checkpoints=_checkpoints(cluster, route),
            evaluations=_read_all(cluster, EvalRun, "EvalRun", namespace),
            target=_feedback_target(route, pods.get(names.FEEDBACK, ())),
            answer=reports.release_answers.get(route.metadata.uid),
            report=reports.routes.get(route.metadata.uid),
        ),
        problem=problem,
    )


def _checkpoints(cluster: Cluster, route: PolicyRoute) -> dict[str, Checkpoint]:
    """Checkpoints of the run that the route serves."""
    return {
        name: each
        for name, each in _read_all(
            cluster, Checkpoint, "Checkpoint", route.metadata.namespace
        ).items()
        if each.spec.run_ref is not None and each.spec.run_ref.uid == route.status.run_uid
    }


def _read_all(cluster: Cluster, model: type[M], kind: str, namespace: str) -> dict[str, M]:
    """Objects of a kind in a namespace by name, without those whose spec is invalid."""
    found = {}
    for manifest in cluster.list_objects(kind):
        if ref(manifest).namespace == namespace:
            with suppress(ValidationError):
                found[ref(manifest).name] = model.parse_known_fields(manifest)
    return found


def _feedback_target(route: PolicyRoute, pods: Sequence[Manifest]) -> str | None:
    """Address for requests and questions about releases."""
    ready = [pod for pod in pods if is_true(pod, "Ready") and not is_deleting(pod)]
    service = names.child(route.metadata.name, names.FEEDBACK)
    port = PORTS[names.FEEDBACK]["grpc"]
    return f"{ref(ready[0]).name}.{service}:{port}" if ready else None


def _find_run(cluster: Cluster, route: PolicyRoute) -> RLRun | None:
    found = cluster.get(Ref("RLRun", route.metadata.namespace, route.spec.run_ref.name))
    with suppress(ValidationError):
        return None if found is None else RLRun.parse_known_fields(found)
    return None


def decide(
    route: PolicyRoute, observed: ObservedRoute, now: ClockReading, platform: Platform
) -> Decision[PolicyRouteStatus]:
    """One pass over one route. No I/O, no clock.

    A route with a problem keeps the parts that it has: they serve on.
    """
    if route.metadata.deletion_timestamp:
        return Decision(status=route.status.model_copy(update={"phase": "Terminating"}))
    run = observed.run
    problem = route_problem(route, run, platform) or cert_manager.cert_manager_problem(
        route, platform.tls, observed.served
    )
    if problem is None and run is not None and route.status.resolved is None:
        pinned = {
            "resolved": Resolved(images=dict(platform.images)),
            "run_uid": run.metadata.uid,
            "phase": "Pending",
        }
        return Decision(status=route.status.model_copy(update=pinned), requeue_after_s=0.0)
    actions: tuple[Action, ...] = ()
    if problem is None and run is not None:
        actions = tuple(_actions(route, run, observed, platform))
    step = requests.next_step(route, observed.releases)
    candidate = CandidateStep(route.status.candidate)
    if problem is None:
        candidate = next_candidate(route, observed.releases)
    accepted = problem or observed.problem or true_condition(ACCEPTED, Reason.ACCEPTED)
    facts = [accepted, *([candidate.fact] if candidate.fact else [])]
    inputs = observed.releases
    known = inputs.checkpoints.values()
    status = route_status(route, observed.pods, now, facts, inputs.report, known)
    actions, again_s = (*actions, *candidate.actions), POLL_S if candidate.fact else None
    if cert_manager.is_cert_manager_missing(platform.tls, observed.served):
        again_s = cert_manager.RETRY_S
    # One at a time: the newest answer of the service is the one that is known.
    order = step.order or candidate.order
    if order is not None:
        actions, again_s = (*actions, order), requests.RESEND_S
    answers = {"request": step.answered, "candidate": candidate.candidate}
    return Decision(
        status=status.model_copy(update=answers),
        actions=actions,
        requeue_after_s=again_s,
    )


def _actions(
    route: PolicyRoute, run: RLRun, observed: ObservedRoute, platform: Platform
) -> Iterator[Action]:
    assert route.status.resolved is not None, "recorded before"  # noqa: S101 - our own mistake
    wanted = route_children(route, run, route.status.resolved.images, platform)
    children = cert_manager.applicable_children(wanted, observed.served)
    for manifest in children:
        live = observed.children.get(ref(manifest))
        if live is None or not is_applied(live, manifest):
            yield Apply(manifest=manifest, manager=names.ROUTE_FIELD_MANAGER)
    yield from _prune(route, observed, {ref(manifest) for manifest in children})


def _prune(route: PolicyRoute, observed: ObservedRoute, wanted: set[Ref]) -> Iterator[Delete]:
    """Children of a channel that left the spec; objects that others gave this owner are kept."""
    ours = {names.MANAGED_BY: names.MANAGER, names.ROUTE: route.metadata.name}.items()
    for key, live in observed.children.items():
        is_part = key.kind in _PARTS and ours <= labels(live).items()
        if is_part and key not in wanted and not is_deleting(live):
            yield Delete(ref=key, uid=uid(live))
