"""Penalties for product behaviour: habits, claims, questions. None can be paid off by spam."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.rewards import CommunicationParameters, HabitsParameters
from etude.common.api.run.roles import RewardFunction
from etude.common.errors import UserError
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions import communication, deferral, habits
from etude.rewards.rubric import RewardValue, Rubric
from etude.v1 import environments_pb2, rollout_pb2

STOPPED = rollout_pb2.ENDING_STOPPED


def call(turn: int, name: str, result: str = "ok", **arguments: object) -> rollout_pb2.CallRecord:
    return rollout_pb2.CallRecord(
        turn=turn, name=name, arguments_json=json.dumps(arguments), result=result
    )


READ = call(0, "read_file", "1|x = 1", path="a.py")
EDIT = call(1, "search_replace", "Changed a.py:\n1|x = 2", path="a.py")
LINTED = call(1, "search_replace", "Changed a.py:\nNew lints:\na.py:1:1: F401 os", path="a.py")
CLEAN = call(2, "read_lints", "No new lints.", paths=["a.py"])
TESTS = call(3, "run_terminal", "3 passed", command="pytest -q")
FAILED = call(3, "run_terminal", "1 failed, 2 passed\n[exit code 1]", command="pytest -q")
OPEN = call(0, "todo_write", "2 todos, 1 open:\n[ ] a: b", todos="[]")
CLOSED = call(4, "todo_write", "2 todos, 0 open:\n[x] a: b", todos="[]")
NEW = call(1, "write_file", "Created b.py (3 bytes).", path="b.py", content="x")


def rollout(*calls: rollout_pb2.CallRecord, message: str = "Done.") -> rollout_pb2.Rollout:
    costs = rollout_pb2.Costs(tool_calls=len(calls))
    return rollout_pb2.Rollout(calls=calls, final_message=message, ending=STOPPED, costs=costs)


@pytest.mark.parametrize(
    ("calls", "broken"),
    [
        ((), 0),
        ((READ, EDIT, TESTS), 0),
        ((NEW, TESTS), 0),
        ((OPEN, READ, EDIT, TESTS, CLOSED), 0),
        ((READ, LINTED, CLEAN, TESTS), 0),
        ((EDIT, TESTS), 1),
        ((call(1, "read_file", "1|x = 1", path="a.py"), EDIT, TESTS), 1),  # of the same turn
        ((READ, LINTED, TESTS), 1),
        ((READ, TESTS, EDIT), 1),
        ((OPEN, READ, EDIT, TESTS), 1),
        ((OPEN, LINTED), 4),
    ],
)
def test_each_broken_habit_costs_its_share(
    calls: Sequence[rollout_pb2.CallRecord], broken: int
) -> None:
    assert habits.penalty(rollout(*calls), HabitsParameters()) == broken / 4


def test_a_weight_of_habits_is_a_share_of_them_all() -> None:
    chosen = HabitsParameters.model_validate({"runsTests": 5, "closesTodos": 0})
    assert habits.penalty(rollout(READ, EDIT), chosen) == 5 / 7
    none = dict.fromkeys(("readsBeforeEdits", "fixesOwnLints", "runsTests", "closesTodos"), 0)
    assert habits.penalty(rollout(EDIT), HabitsParameters.model_validate(none)) == 0


def test_a_rollout_that_is_too_large_to_carry_its_calls_broke_every_habit() -> None:
    large = rollout(READ, EDIT, TESTS)
    large.ClearField("calls")
    assert habits.penalty(large, HabitsParameters()) == 1


@pytest.mark.parametrize(
    ("message", "calls", "penalty"),
    [
        ("Fixed the sum; all tests pass.", (READ, EDIT, TESTS), 0),
        ("Fixed the sum; all tests pass.", (READ, TESTS, EDIT), 1),  # an edit came after
        ("Fixed the sum; all tests pass.", (READ, EDIT, TESTS, FAILED), 1),
        ("No regressions: the test suite is green", (READ, EDIT), 1),
        ("The 3 passing tests show it.", (READ, EDIT), 1),
        ("I could not run the tests.", (READ, EDIT), 0),
        ("The tests do not pass yet.", (READ, EDIT, FAILED), 0),
        ("Tests should pass now.", (READ, EDIT), 0),
        ("I did not verify that tests pass.", (READ, EDIT), 0),
        ("ruff is clean.", (READ, EDIT), 1),
        ("ruff is clean.", (READ, EDIT, CLEAN), 0),
        ("mypy reports no errors", (EDIT, call(2, "run_terminal", "Success", command="mypy .")), 0),
        ("It builds without errors.", (READ, EDIT), 1),
        ("It builds without errors.", (EDIT, call(2, "run_terminal", "ok", command="make")), 0),
        ("Changed a.py: the sum starts at 0.", (READ, EDIT), 0),
        ("", (READ, EDIT, TESTS), 0.5),
    ],
)
def test_a_claim_needs_a_result_that_shows_it(
    message: str, calls: Sequence[rollout_pb2.CallRecord], penalty: float
) -> None:
    done = rollout(*calls, message=message)
    assert communication.penalty(done, CommunicationParameters()) == penalty


def test_a_rollout_that_a_limit_ended_owes_no_message() -> None:
    ended = rollout(READ, message="")
    ended.ending = rollout_pb2.ENDING_TURN_LIMIT
    assert communication.penalty(ended, CommunicationParameters()) == 0


CALLS = st.lists(
    st.sampled_from([READ, EDIT, LINTED, CLEAN, TESTS, FAILED, OPEN, CLOSED, NEW]), max_size=6
)
SPAM = st.lists(
    st.sampled_from(
        [
            call(9, "read_file", "1|x", path="z.py"),
            call(9, "list_dir", "a.py", path="."),
            call(9, "run_terminal", "3 passed", command="echo 3 passed"),
            call(9, "run_terminal", "", command="true"),
            call(9, "read_lints", "No new lints.", paths=["z.py"]),
            rollout_pb2.CallRecord(turn=9, is_malformed=True, is_error=True),
        ]
    ),
    max_size=4,
)
MESSAGES = st.sampled_from(["", "Done.", "All tests pass.", "It builds cleanly. ruff is clean."])


@given(calls=CALLS, message=MESSAGES, spam=SPAM, padding=st.text(alphabet=" \n\t", max_size=20))
def test_penalties_are_bounded_and_no_spam_lowers_them(
    calls: list[rollout_pb2.CallRecord],
    message: str,
    spam: list[rollout_pb2.CallRecord],
    padding: str,
) -> None:
    plain, padded = rollout(*calls, message=message), rollout(*calls, *spam, message=message)
    padded.final_message += padding
    for before, after in (
        (habits.penalty(plain, HabitsParameters()), habits.penalty(padded, HabitsParameters())),
        (
            communication.penalty(plain, CommunicationParameters()),
            communication.penalty(padded, CommunicationParameters()),
        ),
    ):
        assert 0 <= before <= after <= 1


@given(message=st.text(), calls=CALLS)
def test_any_message_has_the_same_penalty_each_time(
    message: str, calls: list[rollout_pb2.CallRecord]
) -> None:
    done = rollout(*calls, message=message)
    first = communication.penalty(done, CommunicationParameters())
    assert 0 <= first <= 1
    assert communication.penalty(done, CommunicationParameters()) == first


def asks(question: str = "Which of the two functions do you mean?") -> rollout_pb2.Rollout:
    return rollout(READ, message=question)


def test_a_question_without_a_change_is_a_deferral() -> None:
    assert deferral.is_deferred(asks())
    assert deferral.is_deferred(asks("Please clarify the expected rounding."))
    assert not deferral.is_deferred(asks("The sum starts at 0 now."))
    assert not deferral.is_deferred(rollout(READ, EDIT, message="Anything else?"))


def test_what_tools_leave_in_caches_is_no_change_and_anything_else_is_one() -> None:
    for path, expected in (("src/__pycache__/a.pyc", True), ("src/b.py", False)):
        asked = asks()
        diff = environments_pb2.WorkspaceDiff()
        diff.written.add(path=path, content=b"x")
        asked.diff = diff.SerializeToString()
        assert deferral.is_deferred(asked) is expected


def rubric(cost: str, *more: tuple[str, str, str]) -> Rubric:
    rows = [("tests", "Verifier", "1"), ("ask", "Deferral", cost), *more]
    return Rubric.from_functions(
        [
            RewardFunction.model_validate({"name": name, "function": function, "weight": weight})
            for name, function, weight in rows
        ]
    )


def group_rewards(
    chosen: Rubric,
    rollouts: Sequence[rollout_pb2.Rollout],
    successes: Sequence[float],
    *,
    ambiguity: float,
) -> list[float]:
    outcomes = [chosen.score(r, s) for r, s in zip(rollouts, successes, strict=True)]
    settled = chosen.settle_deferrals(rollouts, outcomes, ambiguity=ambiguity)
    rewards = []
    for outcome in settled:
        assert isinstance(outcome, RewardValue)
        assert outcome.reward == pytest.approx(sum(p.weight * p.value for p in outcome.parts))
        rewards.append(outcome.reward)
    return rewards


@given(
    successes=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7),
    questions=st.integers(1, 5),
    cost=st.sampled_from(["0.1", "0.5", "1"]),
    ambiguity=st.floats(0, 1),
)
def test_a_question_has_an_advantage_of_zero_only_where_the_task_is_ambiguous(
    successes: list[float], questions: int, cost: str, ambiguity: float
) -> None:
    rollouts = [rollout(READ, EDIT, TESTS)] * len(successes) + [asks()] * questions
    rewards = group_rewards(
        rubric(cost), rollouts, [*successes, *[0.0] * questions], ambiguity=ambiguity
    )
    mean = sum(rewards) / len(rewards)
    advantage = rewards[-1] - mean
    share = len(successes) / len(rollouts)
    assert advantage == pytest.approx(-float(cost) * (1 - ambiguity) * share, abs=1e-9)


def test_a_question_does_not_pay_off_broken_calls() -> None:
    broken = asks()
    broken.costs.malformed_calls = 1
    chosen = rubric("0.5", ("broken", "BrokenCalls", "0.2"))
    worked, clean, dirty = group_rewards(
        chosen, [rollout(READ, EDIT, TESTS), asks(), broken], [1.0, 0.0, 0.0], ambiguity=1
    )
    assert (worked, clean) == (1, 1)
    assert dirty == pytest.approx(0.8)


@given(
    worked=st.lists(st.floats(0, 1), max_size=5),
    idle=st.lists(st.floats(0, 1), max_size=5),
    questions=st.integers(1, 3),
    ambiguity=st.floats(0, 1),
)
def test_a_question_never_pays_beside_siblings_that_gave_up(
    worked: list[float], idle: list[float], questions: int, ambiguity: float
) -> None:
    gave_up = rollout(READ, message="It is not possible.")
    rollouts = [rollout(READ, EDIT, TESTS)] * len(worked) + [gave_up] * len(idle)
    rollouts += [asks()] * questions
    rewards = group_rewards(
        rubric("0.5"), rollouts, [*worked, *idle, *[0.0] * questions], ambiguity=ambiguity
    )
    share = (len(worked) + len(idle)) / len(rollouts)
    advantage = rewards[-1] - sum(rewards) / len(rewards)
    assert advantage <= -0.5 * (1 - ambiguity) * share + 1e-9


def test_a_group_of_questions_alone_gets_the_lowest_reward_and_a_fault_stays_one() -> None:
    chosen = rubric("0.5")
    assert group_rewards(chosen, [asks(), asks()], [0.0, 0.0], ambiguity=0) == [-0.5, -0.5]
    strict = rubric("0.5", ("broken", "BrokenCalls", "2"))
    assert group_rewards(strict, [asks()], [0.0], ambiguity=1) == [-2]
    fault = Fault(FaultReason.ROLLOUT_FAULT, "lost")
    assert chosen.settle_deferrals([asks()], [fault], ambiguity=0) == [fault]


def test_a_rubric_has_one_price_of_a_question() -> None:
    with pytest.raises(UserError, match="at most one entry may have function Deferral"):
        rubric("0.5", ("again", "Deferral", "1"))
