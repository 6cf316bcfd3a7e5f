"""Signal: end of the user's task."""

from collections.abc import Mapping

from etude.common.feedback.payloads import TaskOutcome
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext

_VALUES: Mapping[TaskOutcome, float] = {
    TaskOutcome.MERGED: 1.0,
    TaskOutcome.CLOSED: 0.5,
    TaskOutcome.ABANDONED: 0.0,
    TaskOutcome.REVERTED: -1.0,
}


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Value of the newest end, and 1; a rollout whose task goes on is not counted.

    Delay: the horizon. Tasks end days later: a window may wait for that, and what comes behind it
    counts where outcomes are measured again, and trains nothing.
    """
    state = context.state(history, delay_s=context.horizon_s)
    ends = history.payloads("task_closed")
    if not ends:
        return SignalValue(0.0, 0.0, state)
    return SignalValue(_VALUES[ends[-1].outcome], 1.0, state)


SIGNAL = Signal("task_outcome", version=1, weight=1.0, measure=measure)
