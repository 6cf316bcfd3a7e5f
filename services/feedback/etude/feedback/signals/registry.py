"""Registry of signals, and their measurement over the rollouts of one window."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from etude.feedback.signals import (
    acceptance,
    broken_tool_call,
    deferral,
    edit_persistence,
    followup,
    interruption,
    latency,
    task_outcome,
    tests_passed,
    thumb,
)
from etude.feedback.signals.censoring import CensoringCurve, estimate_censoring
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import RolloutOutcome
from etude.feedback.signals.signal import Signal, SignalContext

SIGNALS: Sequence[Signal] = (
    edit_persistence.SIGNAL,
    followup.SIGNAL,
    acceptance.SIGNAL,
    thumb.SIGNAL,
    broken_tool_call.SIGNAL,
    interruption.SIGNAL,
    deferral.SIGNAL,
    latency.SIGNAL,
    tests_passed.SIGNAL,
    task_outcome.SIGNAL,
)
"""All signals; a new one is a module and a line here."""


def signal_versions() -> Mapping[str, int]:
    """Versions of all signals by name."""
    return {signal.name: signal.version for signal in SIGNALS}


def measure_rollouts(
    histories: Sequence[RolloutHistory],
    *,
    horizon_s: float,
    now_ms: int,
    editing: frozenset[str] = frozenset(),
) -> list[RolloutOutcome]:
    """Measure all signals of rollouts of one version, which share the figures of censoring.

    Args:
        histories: each with at least one turn. [N]
        horizon_s: age at which edits and outcomes count.
        now_ms: time of the server.
        editing: hashes of configurations in which earlier rollouts edited files. Without them, a
            policy that no longer edits anything would have its questions for nothing.

    Returns:
        One outcome for each. [N]
    """
    context = make_context(histories, horizon_s=horizon_s, now_ms=now_ms)
    context = replace(context, editing=context.editing | editing)
    return [_measure(history, context) for history in histories]


def measure_arms(
    histories: Sequence[RolloutHistory], *, horizon_s: float, now_ms: int
) -> list[RolloutOutcome]:
    """Measure all signals of rollouts of several arms, as `measure_rollouts` does of one version.

    Censoring is each arm's own: users who leave because of bad edits would make the other arm's
    losses weigh more. All else is common, so that arms can be compared.
    """
    common = _make_common_context(histories, horizon_s=horizon_s, now_ms=now_ms)
    arms: dict[tuple[str, str], list[RolloutHistory]] = {}
    for history in histories:
        first = history.turns[0]
        arms.setdefault((first.experiment, first.arm), []).append(history)
    outcomes: list[RolloutOutcome] = []
    for arm in arms.values():
        context = replace(common, censoring=_estimate_censoring(arm, horizon_s))
        outcomes += [_measure(history, context) for history in arm]
    return outcomes


def make_context(
    histories: Sequence[RolloutHistory], *, horizon_s: float, now_ms: int
) -> SignalContext:
    """Figures of rollouts that are measured together."""
    common = _make_common_context(histories, horizon_s=horizon_s, now_ms=now_ms)
    return replace(common, censoring=_estimate_censoring(histories, horizon_s))


def _make_common_context(
    histories: Sequence[RolloutHistory], *, horizon_s: float, now_ms: int
) -> SignalContext:
    """Figures of all arms; without censoring."""
    return SignalContext(
        horizon_s=horizon_s,
        now_ms=now_ms,
        usual_wall_s=_usual_wall_s(histories),
        editing=frozenset(
            history.config for history in histories if history.payloads("edit_applied")
        ),
    )


def _estimate_censoring(histories: Sequence[RolloutHistory], horizon_s: float) -> CensoringCurve:
    fates = (
        fate
        for history in histories
        for _, fate in edit_persistence.edit_fates(history, horizon_s=horizon_s)
    )
    return estimate_censoring(fates, horizon_s=horizon_s)


def _usual_wall_s(histories: Sequence[RolloutHistory]) -> Mapping[str, float]:
    walls: dict[str, list[float]] = {}
    for history in histories:
        ends = [each.wall_s for each in history.ended_turns() if each.wall_s > 0]
        walls.setdefault(history.config, []).extend(ends)
    return {config: statistics.median(each) for config, each in walls.items() if each}


def _measure(history: RolloutHistory, context: SignalContext) -> RolloutOutcome:
    first = history.turns[0]
    return RolloutOutcome(
        rollout=history.rollout,
        tenant=history.user.tenant,
        user=history.user.digest,
        policy=history.policy,
        arm=first.arm,
        experiment=first.experiment,
        started_ms=history.started_ms,
        values={signal.name: signal.measure(history, context) for signal in SIGNALS},
    )
