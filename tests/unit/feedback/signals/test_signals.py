"""Signals: values of one rollout's events, with their delays and their care."""

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.support.feedback.turns import turn

from etude.common.feedback import payloads
from etude.common.feedback.payloads import WireModel
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.followup import is_dissatisfied
from etude.feedback.signals.history import (
    RolloutHistory,
    TurnPlace,
    read_turn,
    reduce_event,
)
from etude.feedback.signals.outcome import SignalState, SignalValue
from etude.feedback.signals.registry import SIGNALS, make_context

HORIZON_S = 100.0
LATER_MS = 10**9
MODELS: dict[str, type[WireModel]] = {
    "shown": payloads.ShownPayload,
    "accepted": payloads.AcceptedPayload,
    "rejected": payloads.RejectedPayload,
    "edit_applied": payloads.EditAppliedPayload,
    "edit_observed": payloads.EditObservedPayload,
    "followup": payloads.FollowupPayload,
    "thumb": payloads.ThumbPayload,
    "reason": payloads.ReasonPayload,
    "test_result": payloads.TestResultPayload,
    "turn_ended": payloads.TurnEndedPayload,
    "task_closed": payloads.TaskClosedPayload,
}
Event = tuple[str, dict[str, Any]]


def event(kind: str, **fields: Any) -> Event:
    return kind, fields


def rollout(
    events: Sequence[Event], *, turns: int = 1, user: str = "u", **marks: Any
) -> RolloutHistory:
    history = RolloutHistory("0" * 32, UserId("acme", user))
    for number in range(turns):
        record = turn(user, started_ms=1_000 + number)
        for name, value in marks.items():
            setattr(record, name, value)
        history.turns.append(read_turn(record, TurnPlace("turns/w/0", number)))
    for kind, fields in events:
        payload = TypeAdapter(MODELS[kind]).validate_json(TypeAdapter(dict).dump_json(fields))
        reduced = reduce_event(kind, 1_000, payload)
        assert reduced is not None
        history.add_event(reduced)
    return history


def measure(
    name: str,
    history: RolloutHistory,
    *,
    beside: Sequence[RolloutHistory] = (),
    now_ms: int = LATER_MS,
) -> SignalValue:
    (signal,) = (each for each in SIGNALS if each.name == name)
    context = make_context([history, *beside], horizon_s=HORIZON_S, now_ms=now_ms)
    return signal.measure(history, context)


def applied(turn: int = 0, edit: str = "e", lines: int = 4) -> Event:
    return event("edit_applied", turn=turn, edit=edit, numLines=lines, lineHashes=[])


def looked(age_s: float, alive: int, *, edit: str = "e", seen: bool = True) -> Event:
    return event("edit_observed", edit=edit, ageS=age_s, isFileSeen=seen, numAliveLines=alive)


@pytest.mark.parametrize(
    ("looks", "value", "state"),
    [
        ([looked(10, 4), looked(100.5, 4)], 1.0, SignalState.FINAL),
        ([looked(10, 3), looked(100.5, 1)], 0.25, SignalState.FINAL),
        ([looked(10, 0)], 0.0, SignalState.FINAL),
        ([looked(10, 0), looked(100, 4)], 1.0, SignalState.FINAL),  # it was away for a while
        ([looked(10, 4), looked(50, 0, seen=False)], 1.0, SignalState.CENSORED),
        ([looked(10, 4), looked(200, 0)], 1.0, SignalState.CENSORED),  # lost, and nobody knows when
        ([], 1.0, SignalState.CENSORED),
        ([looked(100, 9)], 1.0, SignalState.FINAL),  # more lines than there are
    ],
)
def test_persistence_is_the_share_of_lines_alive_at_the_horizon(
    looks: list[Event], value: float, state: SignalState
) -> None:
    assert measure("edit_persistence", rollout([applied(), *looks])) == (value, 1, state)


def test_persistence_of_others_makes_up_for_what_was_not_seen() -> None:
    lost = rollout([applied(), looked(10, 4), looked(60, 0)])
    unseen = rollout([applied(), looked(10, 4)], user="v")
    alive = rollout([applied(), looked(10, 4), looked(100, 4)], user="w")
    beside = [unseen, alive]
    assert measure("edit_persistence", lost, beside=beside).numerator == pytest.approx(1 - 3 / 2)


def test_a_signal_waits_until_its_delay_is_over() -> None:
    history = rollout([applied()])
    for name in ("edit_persistence", "acceptance", "dissatisfied_followup"):
        assert measure(name, history, now_ms=2_000).state is SignalState.WAITING
        assert measure(name, history).state is not SignalState.WAITING


@pytest.mark.parametrize(
    ("events", "value"),
    [
        ([event("shown", turn=0)], (0.0, 1)),
        ([event("shown", turn=0), event("accepted", turn=0)], (0.75, 1)),
        ([event("rejected", turn=0)], (-0.25, 1)),
        ([event("accepted", turn=0), event("rejected", turn=0)], (-0.25, 1)),
        ([event("accepted", turn=0), event("shown", turn=1)], (0.75, 2)),
        # A revert after an accept cancels it.
        ([event("accepted", turn=0), applied(), looked(50, 0)], (0.0, 1)),
        ([event("accepted", turn=0), applied(), looked(50, 1)], (0.75, 1)),
        ([event("accepted", turn=0), applied(turn=1), looked(50, 0)], (0.75, 1)),
        ([event("accepted", turn=0), event("task_closed", outcome="Reverted")], (0.0, 1)),
        ([event("rejected", turn=0), event("task_closed", outcome="Reverted")], (-0.25, 1)),
        ([], (0.0, 0)),
    ],
)
def test_the_last_decision_about_a_turn_counts_and_a_revert_cancels_an_accept(
    events: list[Event], value: tuple[float, float]
) -> None:
    assert measure("acceptance", rollout(events))[:2] == value


@pytest.mark.parametrize(
    "text",
    [
        "no, undo that",
        "Revert this please",
        "that's not what I asked for",
        "it still fails with the same error",
        "this doesn't compile",
        "I said the other file",
        "why did you delete my tests?",
        "you broke the build",
        "Don't touch that file",
        "the tests are failing because it is wrong",
    ],
)
def test_complaints_corrections_and_undos_are_dissatisfied(text: str) -> None:
    assert is_dissatisfied(text)


@pytest.mark.parametrize(
    "text",
    [
        "thanks, now add a test for it",
        "great! can you also rename the class?",
        "No problem. Next, the README",
        "what does this function do?",
        "no, that's fine as it is",
        "please write the migration",
        "looks good, commit it",
        "add an undo button to the toolbar",
        "implement rollback of transactions",
        "now fix the failing test in test_a.py",
    ],
)
def test_new_wishes_and_questions_are_not(text: str) -> None:
    assert not is_dissatisfied(text)


def test_a_followup_counts_once_a_turn_and_only_soon() -> None:
    complaint = event("followup", turn=0, text="no, wrong", afterS=5)
    late = event("followup", turn=1, text="no, wrong", afterS=101)
    history = rollout([complaint, complaint, late], turns=3)
    assert measure("dissatisfied_followup", history)[:2] == (1, 3)


@pytest.mark.parametrize("num_calls", [0, 1, 7])
def test_a_complaint_weighs_the_same_however_long_the_policy_worked(num_calls: int) -> None:
    complaint = event("followup", turn=num_calls, text="no, wrong", afterS=5)
    work = rollout([], turns=num_calls, num_calls=1).turns
    for is_cut in (False, True):
        history = rollout([complaint], num_calls=int(is_cut))
        history.turns[:0] = work
        assert measure("dissatisfied_followup", history)[:2] == (1, 1)


def test_questions_do_not_thin_complaints_out() -> None:
    asks = rollout([], turns=3, asks_question=True).turns
    for number in (1, 3):
        history = rollout([event("followup", turn=number, text="no, wrong", afterS=5)])
        history.turns[:0] = asks
        assert measure("dissatisfied_followup", history)[:2] == (1, 1)
    silent = rollout([])
    silent.turns[:0] = asks
    assert measure("dissatisfied_followup", silent)[:2] == (0, 1)


def test_an_interrupted_turn_that_users_complain_about_counts_as_answered() -> None:
    complaints = [event("followup", turn=n, text="no, wrong", afterS=5) for n in (0, 2)]
    history = rollout(complaints, turns=3, num_calls=1)
    assert measure("dissatisfied_followup", history)[:2] == (2, 2)


def test_events_beyond_the_turns_that_were_served_do_not_count() -> None:
    complaints = [event("followup", turn=n, text="no, wrong", afterS=5) for n in range(9)]
    assert measure("dissatisfied_followup", rollout(complaints, turns=2))[:2] == (2, 2)


def test_the_last_thumb_of_a_turn_counts_and_a_reason_alone_is_a_thumb_down() -> None:
    up, down = (event("thumb", turn=0, isPositive=each) for each in (True, False))
    assert measure("thumb", rollout([up, down]))[:2] == (-1, 1)
    assert measure("thumb", rollout([down, up]))[:2] == (1, 1)
    assert measure("thumb", rollout([event("reason", turn=0, category="Slow")]))[:2] == (-1, 1)
    assert measure("thumb", rollout([]))[:2] == (0, 0)


def ended(turn: int = 0, outcome: str = "Completed", wall_s: float = 1.0, **fields: int) -> Event:
    return event("turn_ended", turn=turn, outcome=outcome, wallS=wall_s, **fields)


def test_broken_calls_are_those_that_gateway_or_client_saw() -> None:
    told = rollout([ended(numToolCalls=4, numBrokenToolCalls=1)])
    assert measure("broken_tool_call", told)[:2] == (1, 4)
    silent = rollout([], num_calls=2, num_broken_calls=1)
    assert measure("broken_tool_call", silent)[:2] == (1, 2)
    whitewashed = rollout([ended(numToolCalls=9)], num_calls=1, num_broken_calls=1)
    assert measure("broken_tool_call", whitewashed)[:2] == (1, 9)
    assert measure("broken_tool_call", rollout([ended(outcome="BrokenToolCall")]))[:2] == (1, 1)


def test_cancelled_turns_and_time_outs_are_interruptions() -> None:
    events = [ended(0, "Cancelled"), ended(1, "TimedOut"), ended(2), ended(2)]
    assert measure("interruption", rollout(events, turns=4))[:2] == (2, 4)


def test_latency_is_compared_with_the_median_and_is_bounded() -> None:
    usual = [rollout([ended(wall_s=2.0)], user=user) for user in ("b", "c")]
    value = measure("latency", rollout([ended(wall_s=4.0)]), beside=usual)
    assert value[:2] == pytest.approx((0.6931, 1), abs=1e-4)
    assert measure("latency", rollout([ended(wall_s=1e9)]), beside=usual).numerator == 3.0
    assert measure("latency", rollout([]), beside=usual)[:2] == (0, 0)


def test_the_last_run_of_the_tests_counts() -> None:
    runs = [
        event("test_result", turn=0, numPassed=0, numFailed=4),
        event("test_result", turn=1, numPassed=3, numFailed=0, numErrored=1),
        event("test_result", turn=2, numPassed=0, numFailed=0),
    ]
    assert measure("tests_passed", rollout(runs))[:2] == (0.75, 1)
    assert measure("tests_passed", rollout([]))[:2] == (0, 0)


def test_a_task_is_worth_how_it_ended_last() -> None:
    merged, reverted = (event("task_closed", outcome=each) for each in ("Merged", "Reverted"))
    assert measure("task_outcome", rollout([merged]))[:2] == (1, 1)
    assert measure("task_outcome", rollout([merged, reverted]))[:2] == (-1, 1)
    assert measure("task_outcome", rollout([]))[:2] == (0, 0)


def test_a_question_without_an_edit_is_a_deferral_where_others_edit() -> None:
    edits = [rollout([applied()], user="v")]
    asks = rollout([], asks_question=True)
    assert measure("deferral", asks, beside=edits)[:2] == (1, 1)
    assert measure("deferral", asks)[:2] == (1, 0)  # a product whose policy edits nothing
    assert measure("deferral", rollout([]), beside=edits)[:2] == (0, 1)
    assert measure("deferral", rollout([applied()], asks_question=True))[:2] == (0, 1)


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda each: each.name)
def test_a_rollout_without_an_event_has_every_signal(signal: Any) -> None:
    value = measure(signal.name, rollout([]))
    assert value.numerator == 0
    assert value.denominator >= 0
