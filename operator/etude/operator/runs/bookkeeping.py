"""Bookkeeping in a run's status: intents, restart counters, active time, observed figures."""

from collections.abc import Sequence

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import (
    ActiveTime,
    ReportPosition,
    Restarts,
    RLRunStatus,
    RoleStatus,
)
from etude.common.api.status_types import Resolved
from etude.operator.actions import ClockReading
from etude.operator.builders import run_spec
from etude.operator.builders.platform import Platform
from etude.operator.clock import rfc3339
from etude.operator.reasons import Reason
from etude.operator.runs import status_figures
from etude.operator.runs.capacity import disruptions, engine_count
from etude.operator.runs.checkpoints import resume, start_weights
from etude.operator.runs.lifecycle import holds, limits, transitions
from etude.operator.runs.lifecycle.transitions import RunTransition
from etude.operator.runs.observe import ObservedRun
from etude.operator.runs.status_figures import observed_figures


def status_at_start(
    run: RLRun, observed: ObservedRun, platform: Platform, now: ClockReading
) -> RLRunStatus:
    """The status of a run that is about to get its pods, first or again."""
    status = status_at_acceptance(run, observed, platform, now)
    active = ActiveTime(seconds=status.active.seconds, since=rfc3339(now.wall_s))
    return status.model_copy(update={"active": active})


def status_at_acceptance(
    run: RLRun, observed: ObservedRun, platform: Platform, now: ClockReading
) -> RLRunStatus:
    """The status of a run that is about to get its children."""
    status = run.status
    attempts = transitions.attempts_of(run)
    took = {role.name: role.startup_seconds for role in status.roles}
    roles = tuple(
        RoleStatus(
            name=role,
            desired=pods,
            ready=0,
            attempt=attempts.get(role, status.attempt),
            startup_seconds=took.get(role),
        )
        for role, pods in run_spec.desired_pods(run).items()
    )
    return status.model_copy(
        update={
            "resolved": _resolve(run, observed, platform),
            "resumption": resume.decide_resumption(run, observed.checkpoints),
            "start_time": status.start_time or rfc3339(now.wall_s),
            "roles": roles,
            "phase": status.phase or "Pending",
        }
    )


def _resolve(run: RLRun, observed: ObservedRun, platform: Platform) -> Resolved:
    """Default images as at acceptance; the model as the spec names it now."""
    resolved = run.status.resolved or Resolved(images=dict(platform.images))
    if run.spec.model.checkpoint_ref is None:
        return resolved.model_copy(update={"model_uri": None})
    if observed.model is None or not observed.model.saved_state.uri:
        return resolved
    return resolved.model_copy(update={"model_uri": start_weights.model_folder(observed.model)})


def record_transition(
    run: RLRun, observed: ObservedRun, next_up: RunTransition, now: ClockReading
) -> RLRunStatus:
    """The status with the next intent, its failure and its restart counters."""
    intent = next_up.intent
    # The last figures of a controller that is about to go are written down with its end.
    changes = observed_figures(run, observed, now, is_running=True) | {"intent": intent}
    if next_up.failure is not None:
        changes["last_failure"] = next_up.failure
    if intent is not None and intent.type == "Restart":
        again = [r.name for r in run.status.roles if intent.role in {"", r.name}]
        changes |= {
            "attempt": intent.attempt,
            "roles": tuple(
                _next_attempt(role, intent.attempt, observed) if role.name in again else role
                for role in run.status.roles
            ),
            "restarts": _count_restart(run.status, again),
        }
    if intent is not None:
        changes["hold"] = holds.hold_of(intent) or run.status.hold
    if intent is None and run.status.intent is not None and run.status.intent.type == "Release":
        # A run that its user resumed meanwhile gets pods next; those that it had are gone.
        changes["active"] = _stopped_clock(run, now)
    if intent is not None and (intent.type, intent.reason) == ("Suspend", Reason.BY_USER):
        changes["resumption"] = resume.reset_decision(run.status.resumption)
    return run.status.model_copy(update=changes)


def record_observation(
    run: RLRun, observed: ObservedRun, now: ClockReading, *, is_running: bool, is_over: bool
) -> RLRun:
    """The run with the observed state in its status; conditions are not yet updated."""
    changes = observed_figures(run, observed, now, is_running=is_running)
    changes["observed_generation"] = run.metadata.generation
    changes["restarts"] = disruptions.count_disruptions(
        _reset_restarts(run, observed), observed.pods
    )
    changes["phases"] = status_figures.phase_statuses(run, observed.report.status, is_over=is_over)
    changes["usage"] = limits.account_usage(run, observed.pods, observed.sandboxes, now)
    if is_running and run.status.engines is not None:
        # Only the baseline of the next decision moves here; it is written with the figures.
        changes["engines"] = engine_count.decide_engines(run, observed)
    done = observed.report.acknowledged
    changes["reported"] = ReportPosition(epoch=done.epoch, sequence=done.sequence)
    if run.status.active.since is not None and (
        is_over or (not is_running and observed.has_no_pods)
    ):
        changes["active"] = _stopped_clock(run, now)
    if run.spec.suspend and not is_running and observed.has_no_pods:
        # The pods were gone before the user suspended the run.
        changes["resumption"] = resume.reset_decision(run.status.resumption)
    if is_over:
        changes["intent"] = changes["hold"] = None
        changes["completion_time"] = run.status.completion_time or rfc3339(now.wall_s)
    return run.model_copy(update={"status": run.status.model_copy(update=changes)})


def _stopped_clock(run: RLRun, now: ClockReading) -> ActiveTime:
    """Active time of a run without pods: the clock is stopped."""
    return ActiveTime(seconds=limits.active_s(run, now.wall_s))


def _next_attempt(role: RoleStatus, attempt: int, observed: ObservedRun) -> RoleStatus:
    """A role at a new attempt; pods made before now are of the old one."""
    return role.model_copy(
        update={"attempt": attempt, "ready": 0, "after": observed.newest_pod_created(role.name)}
    )


def _count_restart(status: RLRunStatus, roles: Sequence[str]) -> Restarts:
    restarts = status.restarts
    return restarts.model_copy(
        update={
            "total": restarts.total + 1,
            "counted": restarts.counted + 1,
            "by_role": restarts.by_role | {r: restarts.by_role.get(r, 0) + 1 for r in roles},
            "phase": status.active_phase,
            "step": status.step.current if status.step else 0,
        }
    )


def _reset_restarts(run: RLRun, observed: ObservedRun) -> Restarts:
    """Restart counters, back at zero after enough clean steps."""
    restarts, report = run.status.restarts, observed.report.status
    if not restarts.counted or report is None or not observed.report.is_connected:
        return restarts
    if report.phase != restarts.phase or report.step < restarts.step:
        return restarts.model_copy(update={"phase": report.phase, "step": report.step})
    if report.step - restarts.step >= run.spec.failure_policy.reset_after_steps:
        return restarts.model_copy(update={"counted": 0})
    return restarts
