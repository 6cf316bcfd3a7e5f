"""Idle roles: release of the pods that a phase without sampling does not need."""

import math
from collections.abc import Iterator

from etude.common.api.kinds import RLRun
from etude.common.api.run.phases import Phase
from etude.common.api.run.status import Released
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.builders import run_spec
from etude.operator.clock import parse_rfc3339, rfc3339
from etude.operator.manifests import Manifest, condition, is_true
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2

STARTUP_MARGIN = 1.5
"""Factor on the measured startup time: a role that is late stops all others."""
LEAST_ABSENCE = 2.0
"""Roles are released only if they can stay away this many startup times."""
LEAST_STARTUP_S = 30.0
"""Least startup time that is assumed."""
POOL_STARTUP_S = 60.0
"""Startup time of hosts of a pool that has not measured it."""


def has_fixed_pods(run: RLRun) -> bool:
    """A JobSet or a queue holds a fixed number of pods for the run."""
    scheduling = run.spec.scheduling
    return scheduling.kind == "JobSet" or scheduling.admission != "None"


def idle_roles_problem(run: RLRun) -> str:
    """The sentence that refuses releasing idle roles; empty where they can be released."""
    kinds = {phase.is_rl for phase in run.spec.phases}
    is_held = run.spec.scheduling.idle_roles == "Hold" or run.status.active.since is not None
    if is_held or not has_fixed_pods(run) or len(kinds) < 2:
        return ""
    return (
        "spec.scheduling.idleRoles: a JobSet or a queue holds a fixed number of pods, so roles stay"
        " during a supervised phase that does not need them: set idleRoles: Hold"
    )


def decide_released(run: RLRun, observed: ObservedRun, now: ClockReading) -> Released | None:
    """The status.released to write for a run that holds pods."""
    if run.spec.scheduling.idle_roles == "Hold" or has_fixed_pods(run) or not _has_other_roles(run):
        return None
    if not any(phase.is_rl for phase in run.spec.phases):
        # They are declared for evaluations of the run's checkpoints.
        never = Released(since=rfc3339(now.wall_s), message="no phase of the run samples")
        return run.status.released or never
    return _decide_by_progress(run, observed, now)


def _decide_by_progress(run: RLRun, observed: ObservedRun, now: ClockReading) -> Released | None:
    """The status.released of a run some of whose phases sample."""
    released = run.status.released
    report = observed.report.status if observed.report.is_current else None
    if report is None or not report.phase:
        return released
    if next(_until_sampling(run, report.phase), None) is None:
        return None
    left_s, lead_s = _left_s(run, report), _lead_s(run, observed)
    if left_s is None or lead_s is None:
        return released
    if left_s <= (LEAST_ABSENCE if released is None else 1.0) * lead_s:
        return None
    return released or _new_release(report, left_s, lead_s, now)


def _has_other_roles(run: RLRun) -> bool:
    own_pools = (role.pool_template is not None for role in run.spec.roles.environments)
    return run_spec.pods_by_role(run).keys() != {names.TRAINER} or any(own_pools)


def _new_release(
    report: run_pb2.RunStatus, left_s: float, lead_s: float, now: ClockReading
) -> Released:
    until = "none" if math.isinf(left_s) else f"{left_s:.0f} s away"
    message = f"{report.phase}: reinforcement learning is {until}, roles start in {lead_s:.0f} s"
    return Released(since=rfc3339(now.wall_s), message=message)


def waits_s(run: RLRun, observed: ObservedRun) -> list[float]:
    """Seconds until released roles must start again, if no report comes earlier."""
    report = observed.report.status
    if run.status.released is None or report is None:
        return []
    left_s, lead_s = _left_s(run, report), _lead_s(run, observed)
    if left_s is None or lead_s is None or math.isinf(left_s):
        return []
    return [left_s - lead_s]


def _left_s(run: RLRun, report: run_pb2.RunStatus) -> float | None:
    """Seconds until reinforcement learning begins at the earliest; None while unknown."""
    coming = list(_until_sampling(run, report.phase))
    if len(coming) == sum(1 for _ in _phases_from(run, report.phase)):
        return math.inf
    if not report.step_seconds_p50:
        return None
    steps = 0
    for phase in coming:
        if phase.success_policy is not None:
            break  # it may end after any step
        done = report.step if phase.name == report.phase else 0
        steps += max(0, phase.max_steps - done)
    return steps * report.step_seconds_p50


def _phases_from(run: RLRun, name: str) -> Iterator[Phase]:
    is_reached = False
    for phase in run.spec.phases:
        is_reached = is_reached or phase.name == name
        if is_reached:
            yield phase


def _until_sampling(run: RLRun, name: str) -> Iterator[Phase]:
    """The phases from one on, up to the next that samples."""
    for phase in _phases_from(run, name):
        if phase.is_rl:
            return
        yield phase


def _lead_s(run: RLRun, observed: ObservedRun) -> float | None:
    """Seconds of startup to allow for idle roles; None before all were ready once."""
    took = [role.startup_seconds for role in run.status.roles if role.name != names.TRAINER]
    pools = [
        float(pool.status.provision.p95_seconds)
        if pool.status.provision is not None
        else POOL_STARTUP_S
        for role in run.spec.roles.environments
        if role.pool_template is not None and (pool := observed.pools.get(role.name)) is not None
    ]
    if any(each is None for each in took):
        return None
    slowest_s = max([*(float(each) for each in took if each is not None), *pools], default=0.0)
    return max(LEAST_STARTUP_S, STARTUP_MARGIN * slowest_s)


def startup_s(run: RLRun, observed: ObservedRun, role: str, now: ClockReading) -> int | None:
    """Seconds that a role took to be ready the first time; None before that."""
    known = next((r.startup_seconds for r in run.status.roles if r.name == role), None)
    wanted = run_spec.desired_pods(run)[role]
    pods = observed.pods.get(role, ())
    if known is not None or not wanted or len(pods) < wanted:
        return known
    took = [_pod_startup_s(pod, now) for pod in pods]
    return None if None in took else math.ceil(max(each for each in took if each is not None))


def _pod_startup_s(pod: Manifest, now: ClockReading) -> float | None:
    """Seconds from a pod's creation until it was ready; None while it is not."""
    when = condition(pod, "Ready").get("lastTransitionTime")
    made = pod["metadata"].get("creationTimestamp")
    if not is_true(pod, "Ready") or not made:
        return None
    # The local runtime records no time at which a pod became ready: it is observed immediately.
    return max(0.0, (parse_rfc3339(when) if when else now.wall_s) - parse_rfc3339(made))
