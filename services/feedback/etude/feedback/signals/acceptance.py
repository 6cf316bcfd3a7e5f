"""Signal: suggestions and edits that the user accepts, rejects, or says nothing about."""

from etude.common.feedback.payloads import TaskOutcome
from etude.feedback.signals.edit_persistence import edit_fates
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext

ACCEPTED = 0.75
REJECTED = -0.25
"""With silence at 0, a suggestion is worth showing from a chance of 1 in 4 to be accepted (Cursor
Tab)."""


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Sum over the turns with something shown, and their number. Delay: the horizon.

    The last decision about a turn counts. A revert cancels an accept: it counts as silence if no
    line of the turn's edits is left at the horizon, or if the task is reverted.
    """
    decisions: dict[int, float] = {shown.turn: 0.0 for shown in history.payloads("shown")}
    for event in history.events:
        if event.kind == "accepted":
            decisions[event.turn] = ACCEPTED
        elif event.kind == "rejected":
            decisions[event.turn] = REJECTED
    reverted = _reverted_turns(history, horizon_s=context.horizon_s)
    is_task_reverted = any(
        each.outcome is TaskOutcome.REVERTED for each in history.payloads("task_closed")
    )
    total = sum(
        0.0 if value == ACCEPTED and (is_task_reverted or turn in reverted) else value
        for turn, value in decisions.items()
    )
    state = context.state(history, delay_s=context.horizon_s)
    return SignalValue(total, len(decisions), state)


def _reverted_turns(history: RolloutHistory, *, horizon_s: float) -> set[int]:
    """Turns with edits of which every line was found missing."""
    lines_left: dict[int, bool] = {}
    for edit, fate in edit_fates(history, horizon_s=horizon_s):
        is_left = fate.share_left > 0
        lines_left[edit.turn] = lines_left.get(edit.turn, False) or is_left
    return {turn for turn, is_left in lines_left.items() if not is_left}


SIGNAL = Signal("acceptance", version=1, weight=0.5, measure=measure)
