"""Signal: tests that ran in the user's folder after the policy's turns."""

from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Share of the last run's tests that passed, and 1; a run without tests is none.

    Delay: the horizon. The last run counts, as work may begin with failing tests.
    """
    state = context.state(history, delay_s=context.horizon_s)
    for run in reversed(history.payloads("test_result")):
        total = run.num_passed + run.num_failed + run.num_errored
        if total:
            return SignalValue(run.num_passed / total, 1.0, state)
    return SignalValue(0.0, 0.0, state)


SIGNAL = Signal("tests_passed", version=1, weight=0.5, measure=measure)
