"""Signal: thumbs, and reasons that a user gives without one."""

from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Sum of +1 and -1 over the turns with a verdict, and their number. Delay: the horizon.

    The last thumb of a turn counts. A reason without a thumb is a thumb down: clients ask for one
    with nothing else. Turns without a verdict are not counted: most users never give one.
    """
    verdicts = {reason.turn: -1.0 for reason in history.payloads("reason")}
    for thumb in history.payloads("thumb"):
        verdicts[thumb.turn] = 1.0 if thumb.is_positive else -1.0
    state = context.state(history, delay_s=context.horizon_s)
    return SignalValue(sum(verdicts.values()), len(verdicts), state)


SIGNAL = Signal("thumb", version=1, weight=0.5, measure=measure)
