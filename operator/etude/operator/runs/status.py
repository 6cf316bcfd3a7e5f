"""Status conditions and phase of a run."""

from collections.abc import Iterator, Sequence

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import RLRunStatus, RoleStatus
from etude.operator import names, pod_failures
from etude.operator.checkpoints.status import is_corrupt, is_ready, ready_condition
from etude.operator.clock import rfc3339
from etude.operator.conditions import (
    ConditionFact,
    false_condition,
    merge_conditions,
    true_condition,
)
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason
from etude.operator.runs.capacity import gangs, plan_accuracy
from etude.operator.runs.context import RunContext
from etude.operator.runs.lifecycle import limits
from etude.v1 import run_pb2

State = run_pb2.RunState
SUSPENDING = {"Suspend", "Release"}
NEEDS_REPORT = {"Ready", "Progressing", "Degraded"}
"""Conditions that depend on the controller's report."""


def with_conditions(context: RunContext) -> RLRunStatus:
    """The status with every condition, and the phase derived from them."""
    facts = condition_facts(context)
    return context.run.status.model_copy(
        update={
            "conditions": merge_conditions(
                facts,
                context.run.status.conditions,
                generation=context.run.metadata.generation,
                now=rfc3339(context.now.wall_s),
            ),
            "phase": phase(context, facts),
        }
    )


def condition_facts(context: RunContext) -> list[ConditionFact]:
    """Every condition of the run; always all, so that none is left over."""
    facts = [
        context.unaccepted or true_condition("Accepted", Reason.ACCEPTED),
        _quota_reserved(context),
        _pods_scheduled(context),
        _roles_ready(context),
        _environments_ready(context),
        _ready(context),
        _progressing(context),
        _checkpoint_healthy(context),
        _suspended(context),
        _stalled(context),
        _degraded(context),
        *_end_conditions(context),
    ]
    return [*_recall_unreported(context, facts)] if context.is_awaited else facts


def _recall_unreported(
    context: RunContext, facts: Sequence[ConditionFact]
) -> Iterator[ConditionFact]:
    """The facts, with the last recorded value of those that need the controller."""
    recorded = {each.type: each for each in context.run.status.conditions}
    is_unheard = any(f == _controller_unreachable() for f in facts)
    for fact in facts:
        known = recorded.get(fact.type)
        if is_unheard and known is not None and fact.type in NEEDS_REPORT:
            yield ConditionFact(known.type, known.status == "True", known.reason, known.message)
        else:
            yield fact


def _controller_unreachable() -> ConditionFact:
    message = "the trainer's pod is ready, but its controller does not report: see the pod's log"
    return false_condition("Ready", Reason.CONTROLLER_UNREACHABLE, message)


def phase(context: RunContext, facts: Sequence[ConditionFact]) -> str:
    """The phase for kubectl: the first word that applies."""
    fact = {f.type: f for f in facts}
    intent = context.run.status.intent
    report = context.report
    attempt = max((role.attempt for role in context.run.status.roles), default=0)
    state = report.state if report is not None else State.RUN_STATE_UNSPECIFIED
    phases = (
        (bool(context.run.metadata.deletion_timestamp), "Terminating"),
        (fact["Failed"].holds, "Failed"),
        (fact["Complete"].holds, "Succeeded"),
        (fact["Suspended"].holds, "Suspended"),
        (intent is not None and intent.type in SUSPENDING, "Suspending"),
        (not fact["Accepted"].holds, "Pending"),
        (context.is_queued, "Queued"),
        (not _are_pods_ready(context), "Restarting" if attempt else "Provisioning"),
        (context.is_awaited and fact["Ready"].holds, context.run.status.phase),
        (state in {State.RUN_STATE_UNSPECIFIED, State.RUN_STATE_LOADING}, "Initializing"),
        (state == State.RUN_STATE_CHECKPOINTING, "Checkpointing"),
        (state == State.RUN_STATE_EVALUATING, "Evaluating"),
    )
    return next((word for applies, word in phases if applies), "Running")


def _needed_roles(context: RunContext) -> list[RoleStatus]:
    return [r for r in context.run.status.roles if r.name == names.TRAINER or context.samples_now]


def _are_pods_ready(context: RunContext) -> bool:
    """The pods of the active phase are ready; engines above the minimum may come later."""
    engines = context.run.spec.roles.inference
    least = {names.INFERENCE: engines.least_replicas} if engines is not None else {}
    return all(
        role.desired > 0 and role.ready >= min(role.desired, least.get(role.name, role.desired))
        for role in _needed_roles(context)
    )


def _all_pods(context: RunContext) -> list[Manifest]:
    return [pod for pods in context.observed.pods.values() for pod in pods]


def _quota_reserved(context: RunContext) -> ConditionFact:
    if context.quota is not None:
        return context.quota.fact
    return false_condition("QuotaReserved", context.release_reason or Reason.SUSPENDED)


def _pods_scheduled(context: RunContext) -> ConditionFact:
    if context.release_reason is not None:
        return false_condition("PodsScheduled", context.release_reason)
    gang = gangs.gang_wait(context.run, context.observed, context.now)
    if gang is not None and gang.left_s <= 0:
        return false_condition("PodsScheduled", Reason.GANG_TIMEOUT, gang.message)
    if gang is not None and gang.is_unschedulable:
        return false_condition("PodsScheduled", Reason.UNSCHEDULABLE, gang.message)
    words = pod_failures.unschedulable_message(_all_pods(context))
    reason = Reason.UNSCHEDULABLE if words else Reason.SCHEDULED
    return ConditionFact("PodsScheduled", holds=not words, reason=reason, message=words)


def _roles_ready(context: RunContext) -> ConditionFact:
    if context.release_reason is not None:
        return false_condition("RolesReady", context.release_reason)
    if _are_pods_ready(context):
        return true_condition("RolesReady", Reason.PODS_READY)
    pods = _all_pods(context)
    for reasons, reason in (
        (pod_failures.PULL_FAILURES, Reason.IMAGE_PULL_FAILED),
        (pod_failures.CRASHES, Reason.CRASH_LOOPING),
    ):
        words = pod_failures.waiting_message(pods, reasons)
        if words:
            return false_condition("RolesReady", reason, words)
    missing = ", ".join(
        r.name for r in _needed_roles(context) if r.ready < r.desired or not r.desired
    )
    return false_condition("RolesReady", Reason.PODS_NOT_READY, f"{missing} not ready")


def _environments_ready(context: RunContext) -> ConditionFact:
    if context.release_reason is not None:
        return false_condition("EnvironmentsReady", context.release_reason)
    if not context.run.status.environments:
        return true_condition("EnvironmentsReady", Reason.NOT_NEEDED)
    if context.run.status.released is not None:
        return true_condition(
            "EnvironmentsReady", Reason.NOT_NEEDED, context.run.status.released.message
        )
    missing = [e.pool for e in context.run.status.environments if not e.ready]
    if not missing:
        return true_condition("EnvironmentsReady", Reason.POOLS_AVAILABLE)
    message = f"pool {', '.join(missing)} not available"
    return false_condition("EnvironmentsReady", Reason.POOL_WARMING, message)


def _ready(context: RunContext) -> ConditionFact:
    firsts = [context.unaccepted, _pods_scheduled(context), _roles_ready(context)]
    if context.samples_now:
        firsts.append(_environments_ready(context))
    for fact in firsts:
        if fact is not None and not fact.holds:
            return false_condition("Ready", fact.reason, fact.message)
    if not context.has_connection:
        return _controller_unreachable()
    return true_condition("Ready", Reason.CONTROLLER_CONNECTED)


def _progressing(context: RunContext) -> ConditionFact:
    if context.release_reason is not None or context.unaccepted is not None:
        reason = context.release_reason or Reason.WAITING_FOR_ROLES
        return false_condition("Progressing", reason)
    report = context.report
    waits = (
        (not _are_pods_ready(context), Reason.WAITING_FOR_ROLES, _roles_ready(context).message),
        (
            context.samples_now and not _environments_ready(context).holds,
            Reason.WAITING_FOR_ENVIRONMENTS,
            _environments_ready(context).message,
        ),
        (report is None, Reason.CONTROLLER_UNREACHABLE, "the controller does not report"),
        (
            report is not None and report.state == State.RUN_STATE_LOADING,
            Reason.LOADING,
            "the controller loads its state",
        ),
        (
            report is not None and report.reason == Reason.WAITING_FOR_WINDOW,
            Reason.WAITING_FOR_WINDOW,
            report.message if report is not None else "",
        ),
        (_stalled(context).holds, Reason.NO_PROGRESS, _stalled(context).message),
    )
    for applies, reason, message in waits:
        if applies:
            return false_condition("Progressing", reason, message)
    return true_condition("Progressing", Reason.STEPS_FINISH)


def _checkpoint_healthy(context: RunContext) -> ConditionFact:
    intent = context.run.status.intent
    if intent is not None and intent.reason == Reason.SUSPEND_TIMEOUT:
        return false_condition("CheckpointHealthy", Reason.SUSPEND_TIMEOUT, intent.message)
    newest = next(iter(context.observed.checkpoints), None)
    if newest is None:
        return true_condition("CheckpointHealthy", Reason.NO_CHECKPOINT)
    if is_ready(newest):
        return true_condition("CheckpointHealthy", Reason.CHECKPOINT_VERIFIED)
    if is_corrupt(newest):
        message = f"{newest.metadata.name} does not match its manifest; an older one is used"
        return false_condition("CheckpointHealthy", Reason.CORRUPT, message)
    found = ready_condition(newest)
    if found is not None and found.reason == Reason.STORAGE_UNAVAILABLE:
        message = f"{newest.metadata.name}: {found.message}"
        return false_condition("CheckpointHealthy", Reason.STORAGE_UNAVAILABLE, message)
    return true_condition("CheckpointHealthy", Reason.VERIFYING)


def _suspended(context: RunContext) -> ConditionFact:
    intent = context.run.status.intent
    if context.ending is not None:
        return false_condition("Suspended", Reason.FINISHED)
    if intent is not None and intent.type in SUSPENDING:
        return false_condition(
            "Suspended", Reason.SUSPENDING, "a checkpoint is written, then pods are released"
        )
    if context.run.spec.suspend and context.observed.has_no_pods:
        return true_condition("Suspended", Reason.BY_USER, "spec.suspend is true")
    hold = context.run.status.hold
    if hold is not None and context.observed.has_no_pods:
        return true_condition("Suspended", hold.reason, hold.message)
    return false_condition("Suspended", Reason.NOT_SUSPENDED)


def _stalled(context: RunContext) -> ConditionFact:
    intent = context.run.status.intent
    if intent is not None and intent.reason == Reason.NO_PROGRESS:
        return true_condition("Stalled", Reason.NO_PROGRESS, intent.message)
    left_s = limits.progress_left_s(context.run, context.observed, context.now)
    if context.is_running and left_s is not None and left_s <= 0:
        return true_condition("Stalled", Reason.NO_PROGRESS, "no step finished within the deadline")
    return false_condition("Stalled", Reason.HEALTHY)


def _degraded(context: RunContext) -> ConditionFact:
    report = context.report
    is_over = report is not None and report.state in {
        State.RUN_STATE_FAILED,
        State.RUN_STATE_DONE,
        State.RUN_STATE_SUSPENDED,
    }
    is_waiting = report is not None and report.reason == Reason.WAITING_FOR_WINDOW
    has_problem = report is not None and report.reason and not is_waiting
    if report is not None and has_problem and not is_over and context.ending is None:
        return true_condition("Degraded", report.reason[:64], report.message)
    if context.is_running and context.run.status.restarts.counted and not _are_pods_ready(context):
        last = context.run.status.last_failure
        message = f"{last.pod or last.role}: {last.message}" if last else ""
        return true_condition("Degraded", Reason.ROLE_FAILED, message)
    if context.is_running and context.observed.plan_ratios:
        return true_condition(
            "Degraded",
            Reason.PLAN_UNRELIABLE,
            plan_accuracy.describe_inaccuracy(context.observed.plan_ratios),
        )
    return false_condition("Degraded", Reason.HEALTHY)


def _end_conditions(context: RunContext) -> list[ConditionFact]:
    return [
        context.ending
        if context.ending is not None and context.ending.type == kind
        else false_condition(kind, Reason.NOT_FINISHED)
        for kind in ("Complete", "Failed")
    ]


def recorded_end(run: RLRun) -> ConditionFact | None:
    """The recorded Complete or Failed condition; either is final."""
    for condition in run.status.conditions:
        if condition.type in {"Complete", "Failed"} and condition.status == "True":
            return true_condition(condition.type, condition.reason, condition.message)
    return None
