"""What to do about one run: accept, undertake, carry out, report."""

from collections.abc import Iterator
from dataclasses import dataclass

from etude.common.api.kinds import RLRun
from etude.common.api.status import RLRunStatus
from etude.operator import acceptance, cert_manager, conditions, integrations, names
from etude.operator.actions import Action, Apply, Decision, Delete, Moment
from etude.operator.conditions import Fact
from etude.operator.desired import runs as desired
from etude.operator.desired.runs import Platform, RunShape
from etude.operator.manifests import (
    MADE_ONCE,
    STAYING,
    Manifest,
    Ref,
    is_applied,
    is_deleting,
    labels,
    ref,
    uid,
)
from etude.operator.runs import (
    blind,
    cleanup,
    commands,
    disruptions,
    engines,
    gangs,
    holds,
    idling,
    intents,
    limits,
    priorities,
    queueing,
    quota,
    records,
    registry,
    undertakings,
    usage,
)
from etude.operator.runs import status as run_status
from etude.operator.runs.quota import Quota
from etude.operator.runs.replacements import replacements
from etude.operator.runs.seen import Seen, asks_for_pods
from etude.operator.runs.view import View

WATCHFUL_S = 5.0
"""How often a run is looked at while something is awaited that no event announces."""

INSTALL_S = 30.0
"""What others are to install or to free is looked for this often on behalf of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What one pass works from."""

    run: RLRun
    seen: Seen
    now: Moment
    platform: Platform
    problem: Fact | None
    """What is wrong with the run itself; its children are left alone until that is put right."""
    is_running: bool
    """Whether it should hold pods."""
    quota: Quota | None = None
    """What the queue says of a run that should hold pods."""

    @property
    def is_queued(self) -> bool:
        """Whether it would hold pods if its queue let it."""
        return self.quota is not None and not self.quota.allows_pods

    @property
    def is_resting(self) -> bool:
        """Whether nothing of it has to be there that is not there."""
        return not (self.is_running or self.is_queued)


def decide(run: RLRun, seen: Seen, now: Moment, platform: Platform) -> Decision[RLRunStatus]:
    """One pass over one run. No I/O, no clock.

    An intention is either written down or carried out, never both in one pass: whoever is killed
    in between leaves a record from which the next pass goes on.
    """
    if run.metadata.deletion_timestamp:
        return Decision(status=run.status.model_copy(update={"phase": "Terminating"}))
    problem = acceptance.run_problem(run, seen, platform)
    if problem is not None and blind.is_blind(run, problem):
        return Decision(status=blind.status(run, problem, now), requeue_after_s=INSTALL_S)
    said = quota.quota(run, seen)
    course = Course(
        run=run,
        seen=seen,
        now=now,
        platform=platform,
        problem=problem,
        is_running=_is_wanted(run) and said.allows_pods,
        quota=said if _is_wanted(run) else None,
    )
    ending = run_status.ending_of(run) or _fulfilled(run, seen)
    if ending is not None:
        return _over(course, ending)
    recorded = _recorded(course)
    if recorded is not None:
        return Decision(status=recorded, requeue_after_s=0.0)
    status = _status(course, None)
    return Decision(
        status=status,
        actions=tuple(_actions(course)),
        requeue_after_s=_look_again_s(course),
        is_passing=_is_coming_up(course, status),
    )


def _is_coming_up(course: Course, status: RLRunStatus) -> bool:
    """Whether the run is between the answer to what was asked for and the word that it is Ready."""
    run = course.run
    return (
        course.is_running
        and not (course.problem or course.seen.problem or run.status.intent)
        and run.status.observed_generation == run.metadata.generation
        and not any(conditions.holds(each.conditions, "Ready") for each in (run.status, status))
    )


def _is_wanted(run: RLRun) -> bool:
    """Whether the run should hold pods, by what is written down."""
    if run_status.ending_of(run) is not None:
        return False
    intent = run.status.intent
    if intent is None:
        return holds.asks_for_pods(run)
    match intent.type:
        case "Suspend" | "Restart" | "Salvage":
            return True
        case "Release" | "Fail" | "Complete":
            return False


def _fulfilled(run: RLRun, seen: Seen) -> Fact | None:
    """How the run ended, once nothing asks for its pods any more."""
    intent = run.status.intent
    if intent is None or intent.type not in {"Fail", "Complete"} or not seen.is_released:
        return None
    kind = "Failed" if intent.type == "Fail" else "Complete"
    return Fact(kind, holds=True, reason=intent.reason, message=intent.message)


def _over(course: Course, ending: Fact) -> Decision[RLRunStatus]:
    course = Course(
        run=course.run,
        seen=course.seen,
        now=course.now,
        platform=course.platform,
        problem=None,
        is_running=False,
    )
    run, seen, now = course.run, course.seen, course.now
    actions = (
        *registry.happenings(run, seen),
        *_children(course),
        *disruptions.hurried(seen.pods),
        *queueing.told(run, seen, now, ending),
        *cleanup.deletions(run, seen, ending.type, now),
    )
    again_s = cleanup.next_s(run, ending.type, now)
    return Decision(status=_status(course, ending), actions=actions, requeue_after_s=again_s)


def _recorded(course: Course) -> RLRunStatus | None:
    """The status with what must be known before anything is done; None if all of it is."""
    run, now = course.run, course.now
    if course.problem is not None and run.status.resolved is None:
        return None
    next_up = intents.undertaking(run, course.seen, now)
    if next_up.intent != run.status.intent:
        return records.undertaken(run, course.seen, next_up, now)
    if holds.kept(run, now) != run.status.hold:
        return run.status.model_copy(update={"hold": None})
    count = engines.decided(run, course.seen)
    if course.is_running and engines.is_another(count, run.status.engines):
        return run.status.model_copy(update={"engines": count})
    released = idling.decided(run, course.seen, now)
    if course.is_running and released != run.status.released:
        return run.status.model_copy(update={"released": released})
    return _begun(course)


def _begun(course: Course) -> RLRunStatus | None:
    """The status of a run that is about to get pods, or a place in its queue."""
    run, now = course.run, course.now
    if course.problem is not None:
        return None
    if course.is_running and run.status.active.since is None:
        return records.started(run, course.seen, course.platform, now)
    if course.is_queued:
        accepted = records.accepted(run, course.seen, course.platform, now)
        is_known = (accepted.resolved, accepted.resumption) == (
            run.status.resolved,
            run.status.resumption,
        )
        return None if is_known else accepted
    return None


def _status(course: Course, ending: Fact | None) -> RLRunStatus:
    run = records.observed(
        course.run,
        course.seen,
        course.now,
        is_running=course.is_running,
        is_over=ending is not None,
    )
    view = View(
        run=run,
        seen=course.seen,
        now=course.now,
        problem=course.problem or course.seen.problem,
        is_running=course.is_running,
        quota=course.quota,
        ending=ending,
    )
    return run_status.concluded(view)


def _actions(course: Course) -> Iterator[Action]:
    yield from registry.happenings(course.run, course.seen)
    if course.problem is None or not course.is_running:
        yield from _children(course)
    yield from queueing.told(course.run, course.seen, course.now, None)
    yield from replacements(course.run, course.seen)
    yield from disruptions.hurried(course.seen.pods)
    yield from commands.orders(course.run, course.seen)
    yield from registry.retirements(course.run, course.seen)


def _children(course: Course) -> Iterator[Action]:
    """What differs from what should be; nothing new for a run that holds no pods."""
    run = course.run
    resolved = run.status.resolved
    if resolved is None:
        return
    shape = RunShape(
        images=resolved.images,
        attempts=undertakings.attempts_of(run),
        brokers={name: pool.spec.brokers for name, pool in course.seen.pools.items()},
        engines=engines.kept(run, course.seen),
        is_running=course.is_running,
        is_queued=course.is_queued,
        has_place=quota.has_place(run, course.seen, is_wanted=not course.is_resting),
        priority=priorities.priority(run, course.seen),
        flavors=course.quota.flavors if course.quota is not None else {},
    )
    made = desired.run_children(run, shape, course.platform)
    wanted = cert_manager.possible(made, course.seen.served)
    for manifest in wanted:
        live = course.seen.children.get(ref(manifest))
        if live is not None and _clings(course, live):
            yield Delete(ref=ref(live), uid=uid(live))
            continue
        is_missing = live is None and course.problem is None and not course.is_resting
        if is_missing or (live is not None and not _is_as_made(live, manifest)):
            yield Apply(manifest=manifest, manager=names.RUN_FIELD_MANAGER)
    yield from _prunings(course, {ref(manifest) for manifest in wanted})


def _clings(course: Course, live: Manifest) -> bool:
    """Whether it keeps pods of a run that should hold none, and the cluster takes no change of it.

    A policy that was made later may refuse what was taken once; nobody pays for its pods for ever.
    """
    return not course.is_running and ref(live) in course.seen.refused and asks_for_pods(live)


def _is_as_made(live: Manifest, manifest: Manifest) -> bool:
    return manifest["kind"] in MADE_ONCE or is_applied(live, manifest)


def _prunings(course: Course, wanted: set[Ref]) -> Iterator[Delete]:
    """Children of parts that left the spec; what others gave the run as an owner is theirs."""
    ours = desired.run_labels(course.run).items()
    for key, live in course.seen.children.items():
        is_part = key.kind not in STAYING and ours <= labels(live).items()
        if is_part and key not in wanted and not is_deleting(live):
            yield Delete(ref=key, uid=uid(live))


def _look_again_s(course: Course) -> float | None:
    """When time alone may call for something new."""
    run, seen, now = course.run, course.seen, course.now
    waits: list[float] = []
    is_unsigned = cert_manager.is_absent(course.platform.tls, seen.served)
    if integrations.is_missing(course.problem) or is_unsigned or course.is_queued:
        waits.append(INSTALL_S)
    if run.status.intent is not None:
        waits.append(WATCHFUL_S)
    if not course.is_running:
        return min(waits, default=None)
    waits += [*gangs.waits_s(run, seen, now), *idling.waits_s(run, seen)]
    left = limits.progress_left_s(run, seen, now)
    if left is not None:
        waits.append(left)
    elif run.status.intent is None and not (seen.is_registered and seen.has_saved):
        waits.append(limits.verification_left_s(run, seen, now))
    if seen.report.silent_since_s is not None:
        waits.append(seen.report.silent_since_s + intents.SILENCE_LIMIT_S - now.monotonic_s)
    waits += limits.deadlines_left_s(run, seen, now)
    budget_s = usage.left_s(run, now)
    if budget_s is not None and budget_s != float("inf"):
        waits.append(budget_s)
    # A moment later than computed, so that the limit is crossed by then.
    coming = [wait + 0.1 for wait in waits if wait > 0]
    return min(coming, default=None)
