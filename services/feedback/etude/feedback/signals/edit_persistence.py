"""Signal: share of the policy's lines that are alive at the horizon."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from etude.common.feedback.payloads import EditAppliedPayload, EditObservedPayload
from etude.feedback.signals.censoring import EditFate, LineLoss, persistence
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalState, SignalValue
from etude.feedback.signals.signal import Signal, SignalContext

NAME = "edit_persistence"
LATEST = 1.25
"""Looks up to a quarter after the horizon count as looks at it, and are waited for."""


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Sum over the edits of their persistence, and the number of edits. Delay: the horizon.

    Censored: an edit whose file was not looked at up to the horizon.
    """
    fates = [fate for _, fate in edit_fates(history, horizon_s=context.horizon_s)]
    total = math.fsum(persistence(fate, context.censoring) for fate in fates)
    state = context.state(history, delay_s=LATEST * context.horizon_s)
    is_open = any(fate.seen_s < context.horizon_s and fate.share_left for fate in fates)
    if state is SignalState.FINAL and is_open:
        state = SignalState.CENSORED
    return SignalValue(total, len(fates), state)


class ObservedEdit(NamedTuple):
    """An edit with its fate."""

    edit: EditAppliedPayload
    fate: EditFate


def edit_fates(history: RolloutHistory, *, horizon_s: float) -> Iterator[ObservedEdit]:
    """Edits of a rollout with their fates; an edit that wrote no line has none."""
    looks: dict[str, list[EditObservedPayload]] = {}
    for look in history.payloads("edit_observed"):
        if look.is_file_seen and look.age_s <= LATEST * horizon_s:
            looks.setdefault(look.edit, []).append(look)
    edits: dict[str, EditAppliedPayload] = {}
    for edit in history.payloads("edit_applied"):
        edits.setdefault(edit.edit, edit)  # the first one: a name is used once
    for name, edit in edits.items():
        if edit.num_lines:
            fate = _fate(edit.num_lines, looks.get(name, []), horizon_s=horizon_s)
            yield ObservedEdit(edit, fate)


def _fate(num_lines: int, looks: list[EditObservedPayload], *, horizon_s: float) -> EditFate:
    """Fate of one edit. A line that is seen later was not lost earlier."""
    alive: dict[float, int] = {}
    for look in looks:
        age_s = min(look.age_s, horizon_s)
        alive[age_s] = max(look.num_alive_lines, alive.get(age_s, 0))
    ages = sorted(alive)
    losses: list[LineLoss] = []
    before = num_lines
    for place, age_s in enumerate(ages):
        number = min(before, max(alive[later] for later in ages[place:]))
        if number < before:
            losses.append(LineLoss(age_s, (before - number) / num_lines))
        before = number
    return EditFate(tuple(losses), ages[-1] if ages else 0.0)


SIGNAL = Signal(NAME, version=1, weight=1.0, measure=measure)
