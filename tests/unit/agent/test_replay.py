"""What a log of calls answers, and what it runs again to make a lost environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import replay
from etude.agent.replay import CallLog, DivergedError
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.turns import ToolCall
from etude.common.errors import ReusedIdError

TOOLS = toolset("Standard").tools
KINDS = ("read_file", "grep", "write_file", "run_terminal", "todo_write", "nobody_knows")
READS = frozenset({"read_file", "grep"})


@dataclass
class Model:
    """An environment whose whole state is the list of what changed it."""

    state: tuple[str, ...] = ()
    ran: list[str] = field(default_factory=list)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        return [self._one(call) for call in calls]

    def _one(self, call: ToolCall) -> ToolOutcome:
        self.ran.append(call.call_id)
        if call.arguments_json == "wrong":
            return ToolOutcome(content="no such argument", kind=ErrorKind.INVALID)
        if call.name not in READS:
            self.state += (call.call_id,)
        return ToolOutcome(content=f"{call.name} sees {self.state}")


class Do(NamedTuple):
    """One step of an episode: a turn, a snapshot, or a return to the newest one."""

    what: str
    calls: tuple[tuple[str, str], ...] = ()


turns = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(["{}", "wrong"])), min_size=1, max_size=3
).map(lambda calls: Do("turn", tuple(calls)))
steps = st.lists(st.one_of(turns, turns, st.just(Do("save")), st.just(Do("back"))), max_size=12)


@given(steps=steps)
def test_every_plan_leads_to_the_state_that_was_lost_and_reruns_nothing_that_only_reads(
    steps: list[Do],
) -> None:
    model, log = Model(), CallLog(TOOLS)
    saved: dict[str, tuple[str, ...]] = {}
    for number, step in enumerate(steps):
        if step.what == "turn":
            calls = [ToolCall(f"{number}.{i}", *call) for i, call in enumerate(step.calls)]
            log.add(calls, model.run(calls))
        elif step.what == "save":
            saved[f"s{number}"] = model.state
            log.mark(f"s{number}")
        elif newest := next(iter(log.plans())).snapshot_id:
            model.state = saved[newest]
            log.back_to(newest)

    costs = []
    for plan in log.plans():
        again = Model(saved[plan.snapshot_id] if plan.snapshot_id else ())
        for turn in plan.turns:
            replay.check(turn, again.run([logged.call for logged in turn]))
        assert again.state == model.state
        assert len(again.ran) == plan.num_calls
        assert all(each.call.name not in READS for turn in plan.turns for each in turn)
        costs.append(plan.num_calls)
    assert costs == sorted(costs)


@given(steps=st.lists(turns, max_size=8))
def test_whatever_was_answered_is_answered_again_without_an_environment(steps: list[Do]) -> None:
    model, log = Model(), CallLog(TOOLS)
    told: dict[str, ToolOutcome] = {}
    for number, step in enumerate(steps):
        calls = [ToolCall(f"{number}.{i}", *call) for i, call in enumerate(step.calls)]
        assert log.answered(calls) == {}
        outcomes = model.run(calls)
        log.add(calls, outcomes)
        told |= {call.call_id: each for call, each in zip(calls, outcomes, strict=True)}
        assert log.answered(calls) == {call.call_id: told[call.call_id] for call in calls}


def test_a_call_with_the_id_of_another_is_refused() -> None:
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "read_file", "{}")], [ToolOutcome(content="x")])
    with pytest.raises(ReusedIdError, match="'1' was another call"):
        log.answered([ToolCall("1", "grep", "{}")])


def test_what_happened_after_a_snapshot_is_forgotten_with_a_rollback() -> None:
    log = CallLog(TOOLS)
    first, second = ToolCall("1", "write_file", "{}"), ToolCall("2", "write_file", "{}")
    log.add([first], [ToolOutcome(content="one")])
    log.mark("good")
    log.add([second], [ToolOutcome(content="two")])
    log.mark("bad")

    log.back_to("good")

    assert log.answered([first, second]) == {"1": ToolOutcome(content="one")}
    assert [plan.snapshot_id for plan in log.plans()] == ["good", ""]


def test_a_snapshot_that_was_shared_late_holds_no_turn_that_came_after_it() -> None:
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "write_file", "{}")], [ToolOutcome(content="one")])
    saved = log.num_turns
    log.add([ToolCall("2", "write_file", "{}")], [ToolOutcome(content="two")])
    log.mark("late", saved)

    assert [(plan.snapshot_id, plan.num_calls) for plan in log.plans()] == [("late", 1), ("", 2)]


@pytest.mark.parametrize(
    "now", [ToolOutcome(content="2 passed"), ToolOutcome(content="1 passed", kind=ErrorKind.TOOL)]
)
def test_another_result_is_told_from_the_one_before(now: ToolOutcome) -> None:
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "run_terminal", "{}")], [ToolOutcome(content="1 passed", wall_ms=7)])
    (plan,) = log.plans()
    replay.check(plan.turns[0], [ToolOutcome(content="1 passed", wall_ms=900, cpu_ms=3)])
    with pytest.raises(DivergedError, match=r"call 1 \(run_terminal\)"):
        replay.check(plan.turns[0], [now])


def test_a_log_that_grew_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_LOG_BYTES", 10)
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "read_file", "{}")], [ToolOutcome(content="x" * 8)])
    assert log.is_whole
    log.mark("before")
    log.add([ToolCall("2", "read_file", "{}")], [ToolOutcome(content="x")])
    assert not log.is_whole
    log.back_to("before")
    assert log.is_whole
