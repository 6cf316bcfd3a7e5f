"""Changes between two rounds of visits, with users as the unit."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from etude.demo.realtime.figures import UserRatio, compare_rounds, kept_share, sum_ratio
from etude.feedback.simulate.conversations import Conversation, ConversationEnd
from etude.feedback.simulate.population import Visit
from etude.feedback.simulate.reactions import UserReactions
from etude.feedback.simulate.user_tasks import UserTask

TASK = UserTask(name="t", instruction="i", files={"a": b"1"}, wanted={"a": b"2"})
USERS = 400


def make_round(share: float, seed: int) -> list[Visit]:
    """Visits of users; the rollout's name says how well each went."""
    random = Random(seed)
    return [
        Visit(
            user=f"user-{number}",
            conversation=Conversation(
                rollout=str(int(random.random() < share)),
                version="1.0",
                task=TASK,
                turns=(),
                edits=(),
                num_questions=0,
                is_tested=False,
                ending=ConversationEnd.FINISHED,
                files={},
            ),
            reactions=None,
        )
        for number in range(USERS)
    ]


def measure(visit: Visit) -> UserRatio:
    return UserRatio(float(visit.conversation.rollout), 1)


def test_a_rise_of_twenty_points_excludes_zero() -> None:
    change = compare_rounds(make_round(0.5, 1), make_round(0.7, 2), measure, seed=0)
    assert 0 < change.low < change.after - change.before < change.high


def test_an_interval_covers_no_change_nineteen_times_in_twenty() -> None:
    covers = 0
    for seed in range(40):
        change = compare_rounds(
            make_round(0.6, seed), make_round(0.6, 1_000 + seed), measure, seed=seed
        )
        covers += change.low <= 0 <= change.high
    assert covers >= 33  # three standard deviations below 38


def test_users_who_left_count_before_and_not_after() -> None:
    before = make_round(1.0, 0)
    drop: Callable[[Visit], bool] = lambda visit: visit.user < "user-2"  # noqa: E731
    change = compare_rounds(before, [*filter(drop, before)], measure, seed=0)
    assert (change.before, change.after) == (1.0, 1.0)


def react(num_lines: int, num_kept_lines: int) -> Visit:
    found = UserReactions(
        events=(),
        num_lines=num_lines,
        num_kept_lines=num_kept_lines,
        is_displeased=False,
        has_complained=False,
    )
    return replace(make_round(1.0, 0)[0], reactions=found)


def test_a_conversation_of_many_lines_counts_as_much_as_one_of_few() -> None:
    visits = [react(1, 1), react(99, 0), react(2, 1), react(0, 0)]
    assert sum_ratio(visits, kept_share) == 0.5
