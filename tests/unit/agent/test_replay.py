"""What a log of calls answers, and what it runs again to make a lost environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import replay
from etude.agent.replay import CallLog, DivergedError
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import toolset
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


Turn = list[tuple[str, str]]
TURNS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(["{}", "wrong"])), min_size=1, max_size=3
    ),
    max_size=8,
)


@given(episode=TURNS)
def test_what_is_repeated_leads_to_the_state_that_was_lost_and_only_reads_nothing(
    episode: list[Turn],
) -> None:
    model, log = Model(), CallLog(TOOLS)
    for number, turn in enumerate(episode):
        calls = [ToolCall(f"{number}.{i}", *call) for i, call in enumerate(turn)]
        log.add(calls, model.run(calls))

    again, repeated = Model(), log.calls_to_replay()
    for logged in repeated:
        replay.check_replay(logged, again.run([each.call for each in logged]))
    assert again.state == model.state
    assert all(each.call.name not in READS for logged in repeated for each in logged)


@given(episode=TURNS)
def test_whatever_was_answered_is_answered_again_without_an_environment(
    episode: list[Turn],
) -> None:
    model, log = Model(), CallLog(TOOLS)
    told: dict[str, ToolOutcome] = {}
    for number, turn in enumerate(episode):
        calls = [ToolCall(f"{number}.{i}", *call) for i, call in enumerate(turn)]
        assert log.known_outcomes(calls) == {}
        outcomes = model.run(calls)
        log.add(calls, outcomes)
        told |= {call.call_id: each for call, each in zip(calls, outcomes, strict=True)}
        assert log.known_outcomes(calls) == {call.call_id: told[call.call_id] for call in calls}


def test_a_call_with_the_id_of_another_is_refused() -> None:
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "read_file", "{}")], [ToolOutcome(content="x")])
    with pytest.raises(ReusedIdError, match="'1' was another call"):
        log.known_outcomes([ToolCall("1", "grep", "{}")])


@pytest.mark.parametrize(
    "now", [ToolOutcome(content="2 passed"), ToolOutcome(content="1 passed", kind=ErrorKind.TOOL)]
)
def test_another_result_is_told_from_the_one_before(now: ToolOutcome) -> None:
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "run_terminal", "{}")], [ToolOutcome(content="1 passed", wall_ms=7)])
    (turn,) = log.calls_to_replay()
    replay.check_replay(turn, [ToolOutcome(content="1 passed", wall_ms=900, cpu_ms=3)])
    with pytest.raises(DivergedError, match=r"call 1 \(run_terminal\)"):
        replay.check_replay(turn, [now])


def test_a_log_that_grew_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_LOG_BYTES", 10)
    log = CallLog(TOOLS)
    log.add([ToolCall("1", "read_file", "{}")], [ToolOutcome(content="x" * 8)])
    assert log.is_complete
    log.add([ToolCall("2", "read_file", "{}")], [ToolOutcome(content="x")])
    assert not log.is_complete
