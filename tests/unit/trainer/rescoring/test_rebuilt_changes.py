"""Calls to repeat for a rollout's change, and rollouts whose change cannot be made again."""

import pytest

from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.trajectory import cut_text
from etude.common.errors import EtudeError
from etude.common.harbor.task_file import TaskFile, parse_task_file
from etude.trainer.rescoring.rebuilding import check_results, find_refusal, list_turns
from etude.v1.rollout_pb2 import CallRecord, Costs, Rollout

TOOLS = toolset("Standard").tools
PLAIN = parse_task_file("")


def test_only_calls_that_may_change_something_are_repeated_with_their_place_in_the_turn() -> None:
    calls = [
        CallRecord(turn=0, name="read_file", arguments_json='{"path": "a"}'),
        CallRecord(turn=1, name="grep"),
        CallRecord(turn=1, name="write_file", arguments_json="{}"),
        CallRecord(turn=1, name="run_terminal", is_error=True),
        CallRecord(turn=2, name="write_file", is_malformed=True),
        CallRecord(turn=3, name="no_such_tool"),
    ]
    found = list(list_turns(calls, TOOLS))
    assert [[each.call.call_id for each in turn] for turn in found] == [["1.1", "1.2"]]


def test_results_are_compared_as_far_as_records_hold_them() -> None:
    long = "x" * 10_000 + "end"
    record = CallRecord(name="run_terminal", result=cut_text(long))
    (turn,) = list_turns([record], TOOLS)
    check_results(turn, [ToolOutcome(content=long)])
    with pytest.raises(EtudeError, match=r"call 0.0 \(run_terminal\) had another result"):
        check_results(turn, [ToolOutcome(content=long + "!")])
    with pytest.raises(EtudeError, match="had another result"):
        check_results(turn, [ToolOutcome(content=long, kind=ErrorKind.TOOL)])


@pytest.mark.parametrize(
    ("settings", "rollout", "reason"),
    [
        (PLAIN, Rollout(calls=[CallRecord()], costs=Costs(tool_calls=1)), ""),
        (PLAIN, Rollout(costs=Costs(tool_calls=1)), "too large to keep its calls"),
        (
            parse_task_file('[metadata]\netude_image = "i"\netude_grade = "fork"\n'),
            Rollout(),
            "in a fork",
        ),
        (parse_task_file('[[steps]]\nname = "one"\n'), Rollout(), "several steps"),
    ],
)
def test_a_rollout_that_cannot_be_repeated_is_refused_with_the_reason(
    settings: TaskFile, rollout: Rollout, reason: str
) -> None:
    found = find_refusal(rollout, settings)
    assert reason in found
    assert bool(found) == bool(reason)
