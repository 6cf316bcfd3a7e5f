"""Observed figures in a run's status: steps, rewards, roles, environments, phases."""

import math

from etude.common.api.kinds import RLRun
from etude.common.api.run.phases import Phase
from etude.common.api.run.status import (
    BestCheckpoint,
    CheckpointSummary,
    EnvironmentStatus,
    PhaseStatus,
    RewardStatus,
    RoleStatus,
    RolloutStatus,
    StalenessStatus,
    StepStatus,
)
from etude.operator.actions import ClockReading
from etude.operator.builders import run_spec
from etude.operator.checkpoints.status import is_ready
from etude.operator.clock import rfc3339
from etude.operator.runs.capacity import idle_roles
from etude.operator.runs.checkpoints import retention
from etude.operator.runs.checkpoints.lineage import is_off_lineage
from etude.operator.runs.lifecycle import limits, transitions
from etude.operator.runs.observe import ObservedRun, is_available
from etude.v1 import run_pb2


def observed_figures(
    run: RLRun, observed: ObservedRun, now: ClockReading, *, is_running: bool
) -> dict[str, object]:
    """Status fields that describe the observed state."""
    resumption = run.status.resumption
    past = [c for c in observed.checkpoints if not is_off_lineage(c, resumption)]
    ready = next((c for c in past if is_ready(c)), None)
    figures: dict[str, object] = {
        "roles": _role_statuses(run, observed, now, is_running=is_running),
        "environments": _environment_statuses(run, observed),
    }
    if ready is not None:
        figures["last_checkpoint"] = CheckpointSummary(
            name=ready.metadata.name,
            step=ready.saved_state.step,
            time=ready.status.verified_time or rfc3339(now.wall_s),
        )
    elif resumption is not None and resumption.number:
        figures["last_checkpoint"] = None
    figures["best_checkpoint"] = _best_checkpoint(run, observed, now)
    if observed.report.status is not None:
        figures |= _reported_figures(run, observed.report.status)
    return figures


def _best_checkpoint(run: RLRun, observed: ObservedRun, now: ClockReading) -> BestCheckpoint | None:
    keep = run.spec.checkpointing.keep_best
    best = retention.best_checkpoints([c for c in observed.checkpoints if is_ready(c)], keep)
    value = retention.metric_of(best[0], keep.metric) if best and keep is not None else None
    if value is None:
        return None
    return BestCheckpoint(
        name=best[0].metadata.name,
        step=best[0].saved_state.step,
        time=best[0].status.verified_time or rfc3339(now.wall_s),
        metric=format_figure(value) or "0",
    )


def format_figure(value: float) -> str | None:
    """A number as status text, short enough for a column; None if it is not finite."""
    return f"{value:.4g}" if math.isfinite(value) else None


def _reported_figures(run: RLRun, report: run_pb2.RunStatus) -> dict[str, object]:
    counts = report.rollouts
    figures: dict[str, object] = {
        "active_phase": report.phase,
        "step": StepStatus(
            current=report.step,
            target=report.target_step,
            text=f"{report.step}/{report.target_step}",
        ),
        "policy_version": report.policy_version,
        "lent_engines": report.lent_engines,
        "tokens_per_second": format_figure(report.tokens_per_second),
        "rollouts": RolloutStatus(
            in_flight=counts.in_flight,
            completed=counts.completed,
            trained=counts.trained,
            masked=counts.masked,
            retried=counts.retried,
            dropped=counts.dropped,
        ),
    }
    mean, ewma = format_figure(report.reward_mean), format_figure(report.reward_ewma)
    if counts.trained and mean is not None and ewma is not None:
        figures["reward"] = RewardStatus(mean=mean, ewma=ewma)
        figures["staleness"] = StalenessStatus(
            p50=format_figure(report.staleness_p50) or "0", max=int(report.staleness_max)
        )
    if report.HasField("eval_success"):
        figures["eval_success"] = format_figure(report.eval_success)
    if report.last_step_unix_ms:
        last_s = report.last_step_unix_ms / 1000
        figures["last_step_time"] = rfc3339(last_s)
        held_s = limits.active_s(run, last_s)
        figures["ettr"] = f"{min(1.0, report.productive_seconds / held_s):.3f}" if held_s else None
    return figures


def _role_statuses(
    run: RLRun, observed: ObservedRun, now: ClockReading, *, is_running: bool
) -> tuple[RoleStatus, ...]:
    attempts = transitions.attempts_of(run)
    before = {role.name: role.after for role in run.status.roles}
    return tuple(
        RoleStatus(
            name=role,
            desired=pods if is_running else 0,
            gpus=run_spec.role_spec(run, role).gpus_per_replica * (pods if is_running else 0),
            startup_seconds=idle_roles.startup_s(run, observed, role, now),
            ready=observed.num_ready(role, attempt=attempts.get(role, 0)),
            attempt=attempts.get(role, 0),
            after=before.get(role),
        )
        for role, pods in run_spec.desired_pods(run).items()
    )


def _environment_statuses(run: RLRun, observed: ObservedRun) -> tuple[EnvironmentStatus, ...]:
    statuses = []
    for role in run.spec.roles.environments:
        pool = observed.pools.get(role.name)
        summary = EnvironmentStatus(name=role.name, pool=run_spec.pool_name(run, role))
        if pool is not None:
            summary = summary.model_copy(
                update={
                    "ready": is_available(pool),
                    "driver": pool.status.driver,
                    "isolation": pool.status.isolation,
                    "leased": pool.status.slots.leased if pool.status.slots else 0,
                }
            )
        statuses.append(summary)
    return tuple(statuses)


def phase_statuses(
    run: RLRun, report: run_pb2.RunStatus | None, *, is_over: bool
) -> tuple[PhaseStatus, ...]:
    """Status of every phase of the spec, by the controller's newest report.

    Args:
        run: with the status so far, which has the progress reported before.
        report: of the controller; None while there is none.
        is_over: the run is finished, and no further phase begins.
    """
    reported = {each.name: each for each in report.phases} if report is not None else {}
    recorded = {each.name: each for each in run.status.phases}
    return tuple(
        _skip_if_over(
            _reported_phase(phase, reported[phase.name])
            if phase.name in reported
            else _recorded_phase(phase, recorded.get(phase.name), is_heard=bool(reported)),
            is_over=is_over,
        )
        for phase in run.spec.phases
    )


def _reported_phase(phase: Phase, progress: run_pb2.PhaseProgress) -> PhaseStatus:
    fields = {
        "name": phase.name,
        "state": "Done" if progress.is_done else "Active",
        "step": progress.step,
        "target": progress.target_step,
        "gate": None if phase.gate is None else progress.gate or "Pending",
    }
    return PhaseStatus.model_validate(fields)


def _recorded_phase(phase: Phase, before: PhaseStatus | None, *, is_heard: bool) -> PhaseStatus:
    """A phase that the report does not name: it has not started, if there is a report."""
    if before is not None and not is_heard:
        return before.model_copy(update={"target": phase.max_steps})
    gate = None if phase.gate is None else "Pending"
    return PhaseStatus.model_validate({"name": phase.name, "target": phase.max_steps, "gate": gate})


def _skip_if_over(phase: PhaseStatus, *, is_over: bool) -> PhaseStatus:
    is_skipped = is_over and phase.state == "Waiting"
    return phase.model_copy(update={"state": "Skipped"}) if is_skipped else phase
