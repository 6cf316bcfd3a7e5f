"""Step rate of a run, from its checkpoints: its status has no history."""

from collections.abc import Iterable

from etude.cli.kubectl.seen import Manifest
from etude.cli.kubectl.spans import parsed

HOUR_S = 3_600.0
ASKED_FOR = {"Manual", "Imported"}
"""Reasons of checkpoints that a user created: their time is not that of their step."""


def pace(checkpoints: Iterable[Manifest]) -> float | None:
    """Steps per hour between the newest two checkpoints of different steps that the run scheduled.

    Those are made when they are written, which tells how long it took.
    """
    saved = sorted(
        {
            (int(each["spec"].get("step", 0)), each["metadata"].get("creationTimestamp") or "")
            for each in checkpoints
            if each["spec"].get("reason") not in ASKED_FOR
        },
        reverse=True,
    )
    if not saved:
        return None
    step, when = saved[0]
    for earlier, then in saved[1:]:
        taken_s = (parsed(when) - parsed(then)).total_seconds()
        if earlier < step and taken_s > 0:
            return (step - earlier) / taken_s * HOUR_S
    return None
