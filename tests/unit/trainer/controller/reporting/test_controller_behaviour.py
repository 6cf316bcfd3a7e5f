"""Habits are read off tool calls."""

import json
import math
from collections.abc import Sequence

from prometheus_client import REGISTRY

from etude.trainer.contents.call_figures import measure_calls
from etude.trainer.controller.reporting import behaviour as reporting
from etude.trainer.controller.reporting.behaviour import Behaviour, token_sums
from etude.trainer.controller.reporting.policy_metrics import set_behaviour_metrics
from etude.v1.rollout_content_pb2 import CallFigures
from etude.v1.rollout_pb2 import CallRecord, Costs, Rollout


def call(
    turn: int, name: str, result: str = "", *, error: bool = False, **arguments: str
) -> CallRecord:
    return CallRecord(
        turn=turn, name=name, arguments_json=json.dumps(arguments), result=result, is_error=error
    )


def measure(rollouts: Sequence[Sequence[CallRecord]]) -> list[CallFigures]:
    return [measure_calls(Rollout(calls=calls)) for calls in rollouts]


def behaviour(rollouts: Sequence[Sequence[CallRecord]]) -> Behaviour:
    return reporting.behaviour(measure(rollouts))


def trajectory_figures(rollouts: Sequence[Sequence[CallRecord]]) -> dict[str, float]:
    return reporting.trajectory_figures(measure(rollouts))


READ = call(0, "read_file", "text", path="a.py")
EDIT = call(1, "search_replace", "ok", path="a.py")
PASS = call(2, "run_terminal", "3 passed", command="pytest -q")
FAIL = call(2, "run_terminal", "FAILED test_x\n1 failed", command="pytest -q")


def test_an_edit_after_reading_that_file_counts() -> None:
    assert behaviour([[READ, EDIT]]).read_before_edit == 1.0


def test_a_patch_is_an_edit_of_the_files_that_it_names() -> None:
    patch = call(1, "apply_patch", "ok", patch="--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-x\n+y\n")
    read = call(0, "read_file", "x", path="./b.py")
    assert behaviour([[read, patch]]).read_before_edit == 1.0
    assert behaviour([[READ, patch]]).read_before_edit == 0.0
    assert trajectory_figures([[READ, patch]])["edit_rate"] == 1.0


def test_reading_another_file_or_in_the_same_turn_does_not_count() -> None:
    other = call(0, "read_file", path="b.py")
    beside = call(1, "read_file", path="a.py")
    assert behaviour([[other, EDIT], [beside, EDIT]]).read_before_edit == 0.0


def test_tests_count_only_after_the_last_edit() -> None:
    again = call(3, "search_replace", "ok", path="a.py")
    assert behaviour([[EDIT, PASS]]).tests_after_edit == 1.0
    assert behaviour([[EDIT, PASS, again]]).tests_after_edit == 0.0


def test_tests_in_the_turn_of_the_edit_count_when_they_come_after_it() -> None:
    beside = call(1, "run_terminal", "3 passed", command="pytest -q")
    assert behaviour([[EDIT, beside]]).tests_after_edit == 1.0
    assert behaviour([[beside, EDIT]]).tests_after_edit == 0.0


def test_another_command_is_no_test_run() -> None:
    assert behaviour([[EDIT, call(2, "run_terminal", command="ls")]]).tests_after_edit == 0.0


def test_editing_again_is_judged_only_after_tests_failed_behind_an_edit() -> None:
    again = call(3, "search_replace", "ok", path="a.py")
    early = call(0, "run_terminal", "1 failed", command="pytest -q")
    assert behaviour([[EDIT, FAIL, again]]).edits_after_failed_test == 1.0
    assert behaviour([[EDIT, FAIL]]).edits_after_failed_test == 0.0
    assert behaviour([[early, EDIT, PASS]]).edits_after_failed_test is None


def test_a_count_of_zero_failures_is_a_pass() -> None:
    passed = call(2, "run_terminal", "3 passed, 0 failed", command="pytest")
    assert behaviour([[EDIT, passed]]).edits_after_failed_test is None


def test_refused_edits_and_malformed_calls_are_counted() -> None:
    refused = call(1, "search_replace", "Error: old_string not found", error=True, path="a.py")
    broken = CallRecord(turn=0, name="", is_malformed=True, is_error=True)
    found = behaviour([[READ, refused, EDIT], [broken]])
    assert found.edit_error_rate == 0.5
    assert found.malformed_per_rollout == 0.5
    assert found.with_edit == 1


def test_without_edits_shares_are_unknown() -> None:
    found = behaviour([[READ], []])
    assert found.read_before_edit is None
    assert found.tests_after_edit is None
    assert found.edit_error_rate is None
    assert behaviour([]).malformed_per_rollout == 0.0


def test_arguments_that_are_no_object_do_no_harm() -> None:
    odd = CallRecord(turn=0, name="read_file", arguments_json="[1")
    assert behaviour([[odd, EDIT]]).read_before_edit == 0.0


def test_looks_count_before_the_turn_of_the_first_edit_and_calls_per_turn_of_sound_calls() -> None:
    search, late = call(0, "grep", pattern="x"), call(2, "read_file", "no such file", error=True)
    broken = CallRecord(turn=3, name="read_file", is_malformed=True)
    found = trajectory_figures([[READ, search, EDIT, late, broken], [READ]])
    assert found == {
        "calls_per_turn": 1.25,
        "tool_error_rate": 0.2,
        "edit_rate": 0.5,
        "looks_before_edit": 2.0,
    }
    assert trajectory_figures([[]]) == {"edit_rate": 0.0}


def test_sampled_tokens_are_of_one_kind_each() -> None:
    costs = Costs(
        completion_tokens=100,
        thinking_tokens=40,
        final_message_tokens=10,
        summary_tokens=20,
        tool_output_tokens=7,
    )
    assert token_sums([costs, costs]) == {
        "thinking": 80,
        "call": 60,
        "final_message": 20,
        "summary": 40,
        "tool_output": 14,
    }


def test_behaviour_is_shown_as_metrics_and_a_figure_without_rollouts_as_no_number() -> None:
    row = {"edit_rate": 0.5, **{f"{kind}_tokens": 12 for kind in token_sums([])}}
    set_behaviour_metrics(row, rollouts=4)
    value = REGISTRY.get_sample_value
    assert value("etude_rollout_behaviour", {"figure": "edit_rate"}) == 0.5
    assert math.isnan(value("etude_rollout_behaviour", {"figure": "looks_before_edit"}) or 0)
    assert value("etude_rollout_tokens", {"kind": "thinking"}) == 3
    set_behaviour_metrics(row, rollouts=0)
    assert math.isnan(value("etude_rollout_tokens", {"kind": "thinking"}) or 0)
