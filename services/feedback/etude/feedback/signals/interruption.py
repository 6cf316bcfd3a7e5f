"""Signal: turns that the user cancels, or that run out of time."""

from etude.common.feedback.payloads import TurnOutcome
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Number of such turns, and of turns. Delay: the horizon, for what clients tell late."""
    found = sum(
        end.outcome in {TurnOutcome.CANCELLED, TurnOutcome.TIMED_OUT}
        for end in history.ended_turns()
    )
    turns = len(history.main_turns)
    state = context.state(history, delay_s=context.horizon_s)
    return SignalValue(min(found, turns), turns, state)


SIGNAL = Signal("interruption", version=1, weight=-0.5, measure=measure)
