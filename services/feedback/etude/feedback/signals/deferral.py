"""Signal: rollouts that end with a question, and changed nothing."""

from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext


def is_deferral(history: RolloutHistory) -> bool:
    """True if the newest turn asks the user, and no edit was applied."""
    main = history.main_turns
    return bool(main) and main[-1].asks_question and not history.payloads("edit_applied")


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """1 for such a rollout, and 1, in configurations whose rollouts edit files.

    Delay: the horizon. Without it a question would be worth the mean: no user reverts what was not
    done. A question that is answered, and followed by an edit, costs nothing.
    """
    state = context.state(history, delay_s=context.horizon_s)
    is_editing = history.config in context.editing
    return SignalValue(float(is_deferral(history)), float(is_editing), state)


SIGNAL = Signal("deferral", version=2, weight=-0.5, measure=measure)
