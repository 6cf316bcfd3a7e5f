"""Signals of two arms that are compared: censoring is each arm's own."""

from collections.abc import Sequence

from etude.common.feedback.payloads import EditAppliedPayload, EditObservedPayload
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import (
    RolloutEvent,
    RolloutHistory,
    ServedTurn,
    TurnPlace,
    read_turn,
)
from etude.feedback.signals.outcome import RolloutOutcome
from etude.feedback.signals.registry import measure_arms, measure_rollouts
from etude.v1 import turns_pb2

HORIZON_S = 100.0
LATE_MS = 1_000_000


def history(number: int, arm: str, *looks: tuple[float, int]) -> RolloutHistory:
    """A rollout with one edit of ten lines, and looks at it: age and lines alive."""
    record = turns_pb2.TurnRecord(arm=arm, experiment="canary-1", token_ids=[1])
    turn: ServedTurn = read_turn(record, TurnPlace("k", 0))
    edit = EditAppliedPayload.model_validate(
        {"turn": 0, "edit": "e", "numLines": 10, "lineHashes": []}
    )
    events = [RolloutEvent("edit_applied", 0, edit)]
    events += [
        RolloutEvent(
            "edit_observed",
            0,
            EditObservedPayload.model_validate(
                {"edit": "e", "ageS": age_s, "isFileSeen": True, "numAliveLines": alive}
            ),
        )
        for age_s, alive in looks
    ]
    return RolloutHistory(f"r{number}", UserId("acme", f"u{number}"), [turn], events)


def persistence(outcomes: Sequence[RolloutOutcome], arm: str) -> list[float]:
    return [each.values["edit_persistence"].numerator for each in outcomes if each.arm == arm]


def test_edits_that_are_not_looked_at_in_one_arm_do_not_change_the_other() -> None:
    control = [history(n, "control", (60.0, 5), (100.0, 5)) for n in range(4)]
    leaving = [history(n, "treatment", (50.0, 10)) for n in range(10, 13)]
    staying = [history(20, "treatment", (60.0, 5), (100.0, 5))]
    rollouts = [*control, *leaving, *staying]
    found = measure_arms(rollouts, horizon_s=HORIZON_S, now_ms=LATE_MS)
    alone = measure_rollouts(control, horizon_s=HORIZON_S, now_ms=LATE_MS)
    assert persistence(found, "control") == persistence(alone, "control") == [0.5] * 4
    # The one that was looked at stands for the three others too.
    assert persistence(found, "treatment") == [1.0, 1.0, 1.0, -1.0]
    assert len(found) == len(rollouts)
