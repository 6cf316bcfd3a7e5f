"""Users keep what is right, correct what is wrong, complain or leave; events say no more."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.feedback.events import parse_event
from etude.feedback.simulate.conversations import Conversation, ConversationEnd
from etude.feedback.simulate.event_sender import EventSender
from etude.feedback.simulate.reactions import UserReactions, decide_reactions
from etude.feedback.simulate.users import LeavingReason, SimulatedUser, draw_users, forgive_escapes

HORIZON_S = 10.0
MANY = 3_000
Converse = Callable[..., Conversation]


def react(user: SimulatedUser, seen: Conversation, number: int = 0) -> UserReactions:
    return decide_reactions(
        user.taste, seen, random=user.random(f"visit-{number}"), horizon_s=HORIZON_S
    )


def last_looks(reactions: UserReactions) -> Iterator[Mapping[str, Any]]:
    """The last look at each edit."""
    looks = {each.payload["edit"]: each for each in reactions.events if "ageS" in each.payload}
    yield from (look.payload for look in looks.values())


@given(
    seed=st.integers(0, 1 << 32),
    is_right=st.booleans(),
    ending=st.sampled_from(
        [each for each in ConversationEnd if each is not ConversationEnd.FAILED]
    ),
)
def test_every_reaction_is_an_event_that_the_service_accepts(
    converse: Converse, *, seed: int, is_right: bool, ending: ConversationEnd
) -> None:
    (user,) = draw_users(1, seed=seed)
    seen = converse(is_right=is_right, ending=ending)
    reactions = react(user, seen)
    assert reactions == react(user, seen), "the same chance, and another reaction"
    delays = [each.delay_s for each in reactions.events]
    assert delays == sorted(delays)
    assert max(delays) <= HORIZON_S
    sender = EventSender(httpx2.AsyncClient(), "http://nowhere", "acme", "v1")
    for number, each in enumerate(reactions.events):
        event = sender.make_event(user.name, seen.rollout, number, each.kind, each.payload)
        assert parse_event(json.dumps(event).encode()).kind == each.kind


def test_users_of_a_seed_are_the_same_however_many_are_drawn() -> None:
    assert draw_users(3, seed=1) == draw_users(9, seed=1)[:3]
    assert draw_users(3, seed=1) != draw_users(3, seed=2)


def test_right_lines_are_kept_and_wrong_ones_corrected(converse: Converse) -> None:
    users = draw_users(400, seed=0)
    kept = {
        is_right: sum(react(user, converse(is_right=is_right)).num_kept_lines for user in users)
        / len(users)
        for is_right in (True, False)
    }
    assert kept[True] > 0.9
    assert kept[False] < 0.25


@pytest.mark.parametrize("leaving", list(LeavingReason))
def test_three_in_ten_edits_are_not_seen_to_the_horizon(
    converse: Converse, leaving: LeavingReason
) -> None:
    users = draw_users(MANY, seed=0, leaving=leaving)
    looks = [
        look
        for number, user in enumerate(users)
        for look in last_looks(react(user, converse(is_right=number % 2 == 0)))
    ]
    blind = sum(not look["isFileSeen"] for look in looks) / len(looks)
    # Three standard deviations of a share of 0.3 in so many.
    assert blind == pytest.approx(0.3, abs=0.025)


def test_what_is_seen_of_bad_edits_looks_too_good_where_bad_edits_make_users_leave(
    converse: Converse,
) -> None:
    def seen_share(leaving: LeavingReason) -> float:
        """Kept lines among the edits that were seen to the horizon."""
        users = draw_users(MANY, seed=0, leaving=leaving)
        looks = [
            look
            for number, user in enumerate(users)
            for look in last_looks(react(user, converse(is_right=number % 2 == 0)))
            if look["isFileSeen"]
        ]
        kept: int = sum(look["numAliveLines"] for look in looks)
        return kept / len(looks)

    assert seen_share(LeavingReason.BAD_EDIT) > seen_share(LeavingReason.CHANCE) + 0.05


def test_a_user_who_never_complains_is_displeased_in_silence(converse: Converse) -> None:
    (user,) = draw_users(1, seed=0)
    silent = replace(user, taste=replace(user.taste, complains=0.0))
    for number in range(50):
        reactions = react(silent, converse(ending=ConversationEnd.BROKEN_CALL), number)
        assert reactions.is_displeased
        assert not reactions.has_complained
        assert all(each.kind != "followup" for each in reactions.events)


@pytest.mark.parametrize("ending", [ConversationEnd.QUESTION, ConversationEnd.BROKEN_CALL])
def test_users_who_forgive_mind_no_escape_from_work_but_wrong_work(
    converse: Converse, ending: ConversationEnd
) -> None:
    users = forgive_escapes(draw_users(50, seed=0))
    assert {user.taste.num_answers for user in users} == {0}
    escaped = [react(user, converse(is_right=False, ending=ending)) for user in users]
    assert not any(each.is_displeased or each.has_complained for each in escaped)
    worked = [react(user, converse(is_right=False)) for user in users]
    assert any(each.has_complained for each in worked)
