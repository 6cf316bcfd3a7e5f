"""Engine count of a run: the number of inference replicas that follows its step time."""

import math
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.run.roles import InferenceRole
from etude.common.api.run.status import EngineStatus
from etude.operator import names
from etude.operator.builders import run_spec
from etude.operator.manifests import Ref
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2

SETTLE_VERSIONS = 5
"""Versions to wait after a change before the next decision: smoothed figures forget in as many."""

TOLERANCE = 0.1
"""A need within a tenth of what there is changes nothing: steps are never equally long."""
MAX_FACTOR = 2
"""At most twice as many, or half, at a time: one odd step must not take every GPU."""


class EngineBounds(NamedTuple):
    """Target and limits of the engine count."""

    least: int
    most: int
    step_s: float
    """Target time of a step."""


class StepSignals(NamedTuple):
    """Smoothed figures of the newest steps."""

    tokens: float
    """Tokens sampled for a step."""
    wait_s: float
    """Time that the step waited for them."""
    work_s: float
    """Time of everything else in a step."""
    engines: int
    """Engines that sampled them."""


def desired_engines(signals: StepSignals, bounds: EngineBounds, present: int) -> int:
    """Engines for the target step time.

    N = ceil(tokens per step / (tokens per second of an engine x seconds for sampling)), where the
    seconds for sampling are the target less the other work. An engine gives tokens / (wait x
    engines): idle engines during the trainer's work do not count. The next steps are expected to
    sample as much as the newest ones, so the tokens cancel.

    Args:
        signals: of the newest steps; without figures the count stays.
        bounds: target and limits.
        present: engines desired so far.
    """
    if signals.tokens <= 0 or signals.wait_s <= 0 or signals.engines <= 0:
        return _clamp(present, bounds)
    room_s = bounds.step_s - signals.work_s
    if room_s <= 0:
        return _clamp(MAX_FACTOR * present, bounds)
    need = signals.engines * signals.wait_s / room_s
    if abs(need / present - 1) <= TOLERANCE:
        return _clamp(present, bounds)
    # Rounding noise in need must not cost an engine.
    count = math.ceil(round(min(need, MAX_FACTOR * present), 6))
    return _clamp(max(count, math.ceil(present / MAX_FACTOR)), bounds)


def _clamp(count: int, bounds: EngineBounds) -> int:
    return max(bounds.least, min(count, bounds.most))


def scaled_role(run: RLRun) -> InferenceRole | None:
    """The inference role if its replica count is autoscaled by step time."""
    role = run.spec.roles.inference
    return role if role is not None and role.autoscaling.mode == "StepTime" else None


def decide_engines(run: RLRun, observed: ObservedRun) -> EngineStatus | None:
    """The engine status to write: the count so far, or the next one at a new policy version."""
    role = scaled_role(run)
    if role is None:
        return None
    recorded = run.status.engines or EngineStatus(replicas=role.replicas)
    present = run_spec.engine_replicas(run)
    if present != recorded.replicas:  # the spec has other bounds by now
        recorded = recorded.model_copy(update={"replicas": present})
    report = observed.report.status if observed.report.is_current else None
    if report is None or report.state != run_pb2.RUN_STATE_RUNNING:
        return recorded
    since = report.policy_version - recorded.version
    # Fewer than all tell nothing of all; a lower version is of another store, which counts anew.
    if since < 0 or (report.engines != present and since > 0):
        return recorded.model_copy(update={"version": report.policy_version})
    if since < SETTLE_VERSIONS:
        return recorded
    signals = StepSignals(
        report.step_tokens, report.wait_seconds, report.work_seconds, report.engines
    )
    step_s = float(role.autoscaling.target_step_seconds or 0)
    count = desired_engines(
        signals, EngineBounds(role.least_replicas, role.most_replicas, step_s), present
    )
    if count == present:
        return recorded
    message = (
        f"{present} engines: a step waits {signals.wait_s:.1f} s for {signals.tokens:.0f} tokens"
        f" and works {signals.work_s:.1f} s; targetStepSeconds {step_s:.0f}"
    )
    return EngineStatus(replicas=count, version=report.policy_version, message=message)


def is_changed(decided: EngineStatus | None, before: EngineStatus | None) -> bool:
    """The two counts differ; a new count is recorded before it is acted on."""
    numbers = [None if each is None else each.replicas for each in (decided, before)]
    return numbers[0] != numbers[1]


def surplus_engines(run: RLRun, observed: ObservedRun) -> int | None:
    """Engines to keep until the controller expects fewer; None if there is no surplus."""
    if scaled_role(run) is None:
        return None
    key = Ref("StatefulSet", run.metadata.namespace, names.child(run.metadata.name, "inference"))
    live = observed.children.get(key)
    count, present = run_spec.engine_replicas(run), live["spec"].get("replicas", 1) if live else 0
    report = observed.report.status if observed.report.is_current else None
    does_without = report is not None and 0 < report.engine_limit <= count
    return present if present > count and not does_without else None


def scale_command(run: RLRun, report: run_pb2.RunStatus) -> run_pb2.CommandRequest | None:
    """The command for a controller that expects another engine count; None if it does not."""
    count = run_spec.engine_replicas(run)
    if scaled_role(run) is None or report.engine_limit == count:
        return None
    return run_pb2.CommandRequest(scale_engines=run_pb2.ScaleEngines(replicas=count))
