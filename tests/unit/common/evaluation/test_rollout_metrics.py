"""Edits without evidence, cost and latency of a rollout."""

import json

import pytest

from etude.common.evaluation.rollout_metrics import (
    TokenPrices,
    edits_without_evidence,
    latency_s,
    token_cost,
)
from etude.v1.rollout_pb2 import CallRecord, Costs


def _call(turn: int, name: str, result: str = "ok", **arguments: str) -> CallRecord:
    return CallRecord(turn=turn, name=name, result=result, arguments_json=json.dumps(arguments))


def _edit(turn: int, path: str = "shop/core.py") -> CallRecord:
    return _call(turn, "search_replace", path=path, old_string="a", new_string="b")


SEEN = {
    "read": _call(0, "read_file", path="shop/core.py"),
    "read by a longer name": _call(0, "read_file", path="./shop/core.py"),
    "found by a search": _call(0, "grep", "shop/core.py:3: x = 1", pattern="x"),
    "in a traceback": _call(
        0, "run_terminal", 'File "/workspace/shop/core.py", line 3', command="x"
    ),
    "printed": _call(0, "run_terminal", command="sed -n 1,9p shop/core.py"),
}
UNSEEN = {
    "only listed": _call(0, "list_dir", "core.py\nshop/core.py", path="shop"),
    "another file": _call(0, "read_file", path="shop/core.pyx"),
    "a file of another folder": _call(0, "read_file", path="myshop/core.py"),
    "read in the same turn": _call(1, "read_file", path="shop/core.py"),
    "edited before": _edit(0, "shop/core.py"),
}


@pytest.mark.parametrize("how", SEEN)
def test_an_edit_of_a_file_that_was_seen_has_evidence(how: str) -> None:
    assert edits_without_evidence([SEEN[how], _edit(1)]) == 0


@pytest.mark.parametrize("how", UNSEEN)
def test_an_edit_of_a_file_that_was_not_seen_has_none(how: str) -> None:
    earlier = [UNSEEN[how]] if how == "edited before" else []
    calls = [UNSEEN[how], _edit(1)]
    assert edits_without_evidence(calls) == 1 + len(earlier)


def test_a_refused_read_is_no_evidence_and_a_malformed_call_no_edit() -> None:
    refused = _call(0, "read_file", "no such file", path="shop/core.py")
    refused.is_error = True
    assert edits_without_evidence([refused, _edit(1)]) == 1
    broken = _edit(1)
    broken.is_malformed = True
    assert edits_without_evidence([broken]) == 0


def test_a_file_of_ones_own_needs_no_evidence_but_a_replaced_one_does() -> None:
    new = _call(0, "write_file", "Created new.py (3 bytes).", path="new.py", content="x=1")
    assert edits_without_evidence([new, _edit(1, "new.py")]) == 0
    old = _call(0, "write_file", "Replaced old.py (3 bytes).", path="old.py", content="x=1")
    assert edits_without_evidence([old]) == 1


def test_a_patch_counts_each_file_that_it_changes() -> None:
    patch = (
        "--- a/x.py\n+++ b/x.py\n@@\n--- /dev/null\n+++ b/y.py\n@@\n--- a/z.py\t2024\n+++ b/z.py\n"
    )
    calls = [_call(0, "read_file", path="x.py"), _call(1, "apply_patch", patch=patch)]
    assert edits_without_evidence(calls) == 1


def test_a_patch_of_any_length_counts_64_files_at_most() -> None:
    patch = "".join(f"--- a/f{i}.py\n+++ b/f{i}.py\n@@\n" for i in range(10_000))
    assert edits_without_evidence([_call(0, "apply_patch", patch=patch)]) == 64


def test_a_path_with_the_signs_of_a_pattern_is_a_path() -> None:
    seen = _call(0, "read_file", path="a+(b.py")
    assert edits_without_evidence([seen, _edit(1, "a+(b.py")]) == 0


@pytest.mark.parametrize("arguments", ["", "[]", "{", "[" * 5_000, '{"path": 3}', '{"path": ""}'])
def test_arguments_of_any_form_are_counted_and_raise_nothing(arguments: str) -> None:
    call = CallRecord(turn=0, name="search_replace", arguments_json=arguments)
    assert edits_without_evidence([call]) in {0, 1}


def test_cost_reads_each_token_once_and_latency_is_what_a_user_waits() -> None:
    costs = Costs(
        prompt_tokens=1_000,
        tool_output_tokens=3_000,
        completion_tokens=500,
        tool_seconds=2.5,
        token_seconds=4.0,
    )
    assert token_cost(costs, TokenPrices(read=0.5, sampled=4.0)) == pytest.approx(0.004)
    assert latency_s(costs) == 6.5
