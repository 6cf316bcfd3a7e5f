"""Persistence that is estimated from events, against the hidden truth of a simulated population."""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import httpx2
import pytest

from etude.common.feedback.events import parse_event
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals import edit_persistence
from etude.feedback.signals.history import RolloutHistory, ServedTurn, TurnPlace, reduce_event
from etude.feedback.signals.registry import measure_rollouts
from etude.feedback.simulate.conversations import Conversation
from etude.feedback.simulate.event_sender import EventSender
from etude.feedback.simulate.reactions import UserReactions, decide_reactions
from etude.feedback.simulate.users import LeavingReason, draw_users

HORIZON_S = 10.0
LATER_MS = 60_000
USERS = 8_000
"""The estimate of a share of 0.6 has a standard deviation of 0.006 with so many."""


class Estimates(NamedTuple):
    truth: float
    estimate: float
    seen: float
    """Among the edits that were seen to the horizon."""


@pytest.fixture(scope="module")
def estimate(
    converse: Callable[..., Conversation],
) -> Callable[[LeavingReason], Estimates]:
    """Estimates persistence from the events of a population; half of its edits are right."""
    sender = EventSender(httpx2.AsyncClient(), "http://nowhere", "acme", "v1")
    turn = ServedTurn(
        place=TurnPlace("k", 0),
        started_ms=0,
        received_ms=0,
        policy=None,
        arm="stable",
        experiment="",
        config="",
        num_tokens=9,
        num_calls=0,
        num_broken_calls=0,
        asks_question=False,
        is_side=False,
    )

    def history(name: str, seen: Conversation, reactions: UserReactions) -> RolloutHistory:
        found = RolloutHistory(name, UserId("acme", name), [turn])
        edits = [each for each in reactions.events if each.kind.startswith("edit_")]
        for number, each in enumerate(edits):
            sent = sender.make_event(name, seen.rollout, number, each.kind, each.payload)
            event = parse_event(json.dumps(sent).encode())
            reduced = reduce_event(event.kind, int(1_000 * each.delay_s), event.data.payload)
            if reduced is not None:
                found.add_event(reduced)
        return found

    def run(leaving: LeavingReason) -> Estimates:
        histories: list[RolloutHistory] = []
        reacted: list[UserReactions] = []
        for number, user in enumerate(draw_users(USERS, seed=3, leaving=leaving)):
            seen = converse(is_right=number % 2 == 0)
            reacted.append(
                decide_reactions(user.taste, seen, random=user.random("visit"), horizon_s=HORIZON_S)
            )
            histories.append(history(user.name, seen, reacted[-1]))
        outcomes = measure_rollouts(histories, horizon_s=HORIZON_S, now_ms=LATER_MS)
        values = [each.values[edit_persistence.NAME] for each in outcomes]
        return Estimates(
            sum(each.num_kept_lines for each in reacted) / sum(e.num_lines for e in reacted),
            sum(each.numerator for each in values) / sum(each.denominator for each in values),
            seen_share(reacted),
        )

    return run


def seen_share(reacted: Sequence[UserReactions]) -> float:
    looks = [
        each.payload["numAliveLines"]
        for reactions in reacted
        for each in reactions.events
        if each.payload.get("ageS") == HORIZON_S and each.payload["isFileSeen"]
    ]
    return sum(map(int, map(str, looks))) / len(looks)


def test_users_who_leave_by_chance_do_not_bias_the_estimate(
    estimate: Callable[[LeavingReason], Estimates],
) -> None:
    found = estimate(LeavingReason.CHANCE)
    assert found.estimate == pytest.approx(found.truth, abs=0.01)


def test_users_who_leave_because_of_bad_edits_make_it_look_too_good(
    estimate: Callable[[LeavingReason], Estimates],
) -> None:
    found = estimate(LeavingReason.BAD_EDIT)
    # The figures of docs/concepts/production-loop.md.
    assert found == pytest.approx((0.534, 0.619, 0.648), abs=0.001)
