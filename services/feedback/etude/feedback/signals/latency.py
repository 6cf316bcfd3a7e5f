"""Signal: seconds of turns, compared with the usual ones of the same product."""

import math

from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext

_LARGEST = 3.0
"""Cut of a turn's value, at 20 times the usual: clients tell what they like."""


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Sum of log(wall / median of its configuration) over the turns with a time, and their number.

    Delay: the horizon, for what clients tell late. Logarithms make twice and half as long opposite.
    """
    usual_s = context.usual_wall_s.get(history.config, 0.0)
    if usual_s <= 0:
        return SignalValue(0.0, 0.0)
    walls = [end.wall_s for end in history.ended_turns() if end.wall_s > 0]
    ratios = (math.log(wall / usual_s) for wall in walls)
    total = math.fsum(max(-_LARGEST, min(_LARGEST, ratio)) for ratio in ratios)
    return SignalValue(total, len(walls), context.state(history, delay_s=context.horizon_s))


SIGNAL = Signal("latency", version=1, weight=-0.1, measure=measure)
