"""Decision about one run. It answers: what does the run do next?

`decide` accepts the run, records an intent (runs/lifecycle/intents.py) or carries the recorded one
out as actions on children, pods and the controller, and reports the status. "Why did its pods go?"
is answered by runs/lifecycle/failure_policy.py.
"""

from collections.abc import Iterator
from dataclasses import replace

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import RLRunStatus
from etude.operator import conditions, names
from etude.operator.actions import Action, Apply, ClockReading, Decision, Delete
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape, run_children
from etude.operator.conditions import ConditionFact
from etude.operator.integrations import apis, cert_manager
from etude.operator.manifests import (
    CREATE_ONLY,
    Manifest,
    is_applied,
    ref,
    uid,
)
from etude.operator.runs import acceptance, bookkeeping
from etude.operator.runs import status as run_status
from etude.operator.runs.capacity import disruptions, engine_count, gangs, idle_roles, kueue
from etude.operator.runs.capacity.disruptions import replace_old_pods
from etude.operator.runs.checkpoints import registry
from etude.operator.runs.context import RunContext
from etude.operator.runs.lifecycle import cleanup, commands, holds, intents, limits, transitions
from etude.operator.runs.observe import ObservedRun, asks_for_pods

POLL_S = 5.0
"""Time between two passes while a change is awaited that no event announces."""

RECHECK_S = 30.0
"""Time between two passes that wait for an installation or for quota."""


def decide(
    run: RLRun, observed: ObservedRun, now: ClockReading, platform: Platform
) -> Decision[RLRunStatus]:
    """One pass over one run. No I/O, no clock.

    An intent is either recorded or carried out, never both in one pass: after a crash in between
    the next pass continues from the record.
    """
    if run.metadata.deletion_timestamp:
        return Decision(status=run.status.model_copy(update={"phase": "Terminating"}))
    problem = acceptance.run_problem(run, observed, platform)
    if problem is not None and acceptance.lacks_workload_api(run, problem):
        return Decision(
            status=acceptance.status_without_api(run, problem, now), requeue_after_s=RECHECK_S
        )
    quota = kueue.quota_state(run, observed)
    context = RunContext(
        run=run,
        observed=observed,
        now=now,
        platform=platform,
        problem=problem,
        is_running=_wants_pods(run) and quota.allows_pods,
        quota=quota if _wants_pods(run) else None,
    )
    ending = run_status.recorded_end(run) or _reached_end(run, observed)
    if ending is not None:
        return _decide_finished(context, ending)
    recorded = _status_to_record(context)
    if recorded is not None:
        return Decision(status=recorded, requeue_after_s=0.0)
    status = _status(context)
    return Decision(
        status=status,
        actions=tuple(_actions(context)),
        requeue_after_s=_requeue_after_s(context),
        is_transient=_is_starting(context, status),
    )


def _is_starting(context: RunContext, status: RLRunStatus) -> bool:
    """The run starts: it is accepted and not Ready yet."""
    run = context.run
    return (
        context.is_running
        and not (context.unaccepted or run.status.intent)
        and run.status.observed_generation == run.metadata.generation
        and not any(
            conditions.is_condition_true(each.conditions, "Ready") for each in (run.status, status)
        )
    )


def _wants_pods(run: RLRun) -> bool:
    """The recorded intent and spec ask for pods."""
    if run_status.recorded_end(run) is not None:
        return False
    intent = run.status.intent
    if intent is None:
        return holds.wants_pods(run)
    match intent.type:
        case "Suspend" | "Restart" | "Salvage":
            return True
        case "Release" | "Fail" | "Complete":
            return False


def _reached_end(run: RLRun, observed: ObservedRun) -> ConditionFact | None:
    """The end of the run, once its pods are released; None before that."""
    intent = run.status.intent
    if intent is None or intent.type not in {"Fail", "Complete"} or not observed.is_released:
        return None
    kind = "Failed" if intent.type == "Fail" else "Complete"
    return ConditionFact(kind, holds=True, reason=intent.reason, message=intent.message)


def _decide_finished(context: RunContext, ending: ConditionFact) -> Decision[RLRunStatus]:
    context = replace(context, problem=None, is_running=False, quota=None, ending=ending)
    run, observed, now = context.run, context.observed, context.now
    actions = (
        *registry.handle_reports(run, observed),
        *_children(context),
        *disruptions.hurry_starting_pods(observed.pods),
        *kueue.workload_updates(run, observed, now, ending),
        *cleanup.due_deletions(run, observed, ending.type, now),
    )
    again_s = cleanup.next_deletion_s(run, ending.type, now)
    return Decision(status=_status(context), actions=actions, requeue_after_s=again_s)


def _status_to_record(context: RunContext) -> RLRunStatus | None:
    """The status with a decision that must be recorded first; None if there is none."""
    run, now = context.run, context.now
    if context.problem is not None and run.status.resolved is None:
        return None
    next_up = intents.next_transition(run, context.observed, now)
    if next_up.intent != run.status.intent:
        return bookkeeping.record_transition(run, context.observed, next_up, now)
    if holds.current_hold(run, now) != run.status.hold:
        return run.status.model_copy(update={"hold": None})
    count = engine_count.decide_engines(run, context.observed)
    if context.is_running and engine_count.is_changed(count, run.status.engines):
        return run.status.model_copy(update={"engines": count})
    released = idle_roles.decide_released(run, context.observed, now)
    if context.is_running and released != run.status.released:
        return run.status.model_copy(update={"released": released})
    return _status_before_start(context)


def _status_before_start(context: RunContext) -> RLRunStatus | None:
    """The status of a run that is about to get pods or to be queued; None if it is recorded."""
    run, now = context.run, context.now
    if context.problem is not None:
        return None
    if context.is_running and run.status.active.since is None:
        return bookkeeping.status_at_start(run, context.observed, context.platform, now)
    if context.is_queued:
        accepted = bookkeeping.status_at_acceptance(run, context.observed, context.platform, now)
        is_known = (accepted.resolved, accepted.resumption) == (
            run.status.resolved,
            run.status.resumption,
        )
        return None if is_known else accepted
    return None


def _status(context: RunContext) -> RLRunStatus:
    run = bookkeeping.record_observation(
        context.run,
        context.observed,
        context.now,
        is_running=context.is_running,
        is_over=context.ending is not None,
    )
    return run_status.with_conditions(replace(context, run=run))


def _actions(context: RunContext) -> Iterator[Action]:
    yield from registry.handle_reports(context.run, context.observed)
    if context.problem is None or not context.is_running:
        yield from _children(context)
    yield from kueue.workload_updates(context.run, context.observed, context.now, None)
    yield from replace_old_pods(context.run, context.observed)
    yield from disruptions.hurry_starting_pods(context.observed.pods)
    yield from commands.due_commands(context.run, context.observed)
    yield from registry.retire_superseded(context.run, context.observed)


def _children(context: RunContext) -> Iterator[Action]:
    """Children that differ from the desired ones; none are created for a run without pods."""
    run = context.run
    resolved = run.status.resolved
    if resolved is None:
        return
    shape = RunShape(
        images=resolved.images,
        attempts=transitions.attempts_of(run),
        engines=engine_count.surplus_engines(run, context.observed),
        is_running=context.is_running,
        is_queued=context.is_queued,
        has_workload=kueue.needs_workload(run, context.observed, is_wanted=not context.is_resting),
        priority=kueue.queue_priority(run, context.observed),
        flavors=context.quota.flavors if context.quota is not None else {},
    )
    desired = run_children(run, shape, context.platform)
    children = cert_manager.applicable_children(desired, context.observed.served)
    for manifest in children:
        live = context.observed.children.get(ref(manifest))
        if live is not None and _keeps_rejected_pods(context, live):
            yield Delete(ref=ref(live), uid=uid(live))
            continue
        is_missing = live is None and context.problem is None and not context.is_resting
        if is_missing or (live is not None and not _is_up_to_date(live, manifest)):
            yield Apply(manifest=manifest, manager=names.RUN_FIELD_MANAGER)
    yield from cleanup.prune(run, context.observed, {ref(manifest) for manifest in children})


def _keeps_rejected_pods(context: RunContext, live: Manifest) -> bool:
    """The child keeps pods of a run that should hold none, and the cluster rejects its change.

    A later policy may reject what was admitted once; its pods must not stay for ever.
    """
    return not context.is_running and ref(live) in context.observed.rejected and asks_for_pods(live)


def _is_up_to_date(live: Manifest, manifest: Manifest) -> bool:
    return manifest["kind"] in CREATE_ONLY or is_applied(live, manifest)


def _requeue_after_s(context: RunContext) -> float | None:
    """Seconds after which time alone may change the decision; None if it cannot."""
    run, observed, now = context.run, context.observed, context.now
    waits: list[float] = []
    is_unsigned = cert_manager.is_cert_manager_missing(context.platform.tls, observed.served)
    if apis.is_api_missing(context.problem) or is_unsigned or context.is_queued:
        waits.append(RECHECK_S)
    if run.status.intent is not None:
        waits.append(POLL_S)
    if not context.is_running:
        return min(waits, default=None)
    waits += [*gangs.waits_s(run, observed, now), *idle_roles.waits_s(run, observed)]
    left = limits.progress_left_s(run, observed, now)
    if left is not None:
        waits.append(left)
    elif run.status.intent is None and not (observed.is_registered and observed.has_saved):
        waits.append(limits.verification_left_s(run, observed, now))
    if observed.report.disconnected_since_s is not None:
        waits.append(
            observed.report.disconnected_since_s + limits.SILENCE_LIMIT_S - now.monotonic_s
        )
    waits += limits.deadlines_left_s(run, observed, now)
    budget_s = limits.budget_left_s(run, now)
    if budget_s is not None and budget_s != float("inf"):
        waits.append(budget_s)
    # A moment later than computed, so that the limit is crossed by then.
    coming = [wait + 0.1 for wait in waits if wait > 0]
    return min(coming, default=None)
