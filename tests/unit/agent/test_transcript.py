"""Facts about calls rest on what tools answered, not on what a policy writes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import transcript
from etude.agent.transcript import Edit
from etude.v1 import rollout_pb2


def call(name: str, result: str = "ok", **arguments: object) -> rollout_pb2.CallRecord:
    return rollout_pb2.CallRecord(name=name, arguments_json=json.dumps(arguments), result=result)


def run(command: str, result: str) -> rollout_pb2.CallRecord:
    return call("run_terminal", result, command=command)


@pytest.mark.parametrize(
    ("command", "result", "outcome"),
    [
        ("pytest -q", "3 passed in 0.1s", True),
        ("cd src && python3.11 -m pytest -x -k 'a | b'", "3 passed", True),
        ("PYTHONPATH=. timeout 60 uv run pytest 2>&1 | tail -5", "12 passed", True),
        ("# run them\ngo test ./...", "ok  \tshop/cart\t0.01s", True),
        ("cargo test", "test result: ok. 3 passed; 0 failed", True),
        ("pytest -q", "1 failed, 3 passed", False),
        ("pytest -q", "3 passed\n[exit code 1]", False),
        ("python -m unittest", "Ran 2 tests\n\nOK", True),
        ("python -m unittest", "FAILED (failures=1)", False),
        ("go test ./...", "ok a\nFAIL\tshop/cart", False),
        ("pytest -q > /dev/null", "(no output)", False),
        ("pytest --version; echo 3 passed", "3 passed", False),
        ("pytest -q || cat forged.txt", "3 passed", False),
        ("./pytest -q", "3 passed", None),
        ("echo pytest: 3 passed", "pytest: 3 passed", None),
        ("pytest 'unclosed", "3 passed", None),
        ("", "3 passed", None),
    ],
)
def test_a_test_run_passed_only_if_nothing_else_could_have_printed_so(
    command: str, result: str, *, outcome: bool | None
) -> None:
    assert transcript.read_test_outcome(run(command, result)) is outcome


def test_a_call_that_timed_out_or_is_malformed_shows_no_passed_tests() -> None:
    late = run("pytest", "3 passed")
    late.is_error = True
    assert transcript.read_test_outcome(late) is False
    late.is_malformed = True
    assert transcript.read_test_outcome(late) is None


PATCH = """\
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -1 +1 @@
-x = 1
+x = 2
--- /dev/null
+++ b/shop/new.py
@@ -0,0 +1 @@
+y = 1
--- a/shop/old.py
+++ /dev/null
@@ -1 +0,0 @@
-z = 1
"""


def test_edits_are_those_that_the_tools_made() -> None:
    refused = call("search_replace", "Error: old_string not found", path="a.py")
    refused.is_error = True
    assert transcript.edits(refused) == ()
    assert transcript.edits(call("read_file", path="a.py")) == ()
    assert transcript.edits(call("search_replace", path="./src/../a.py")) == (
        Edit("a.py", is_new=False),
    )
    created = call("write_file", "Created b.py (3 bytes).", path="b.py", content="x")
    assert transcript.edits(created) == (Edit("b.py", is_new=True),)
    assert transcript.edits(call("apply_patch", "Applied the patch:", patch=PATCH)) == (
        Edit("shop/cart.py", is_new=False),
        Edit("shop/new.py", is_new=True),
        Edit("shop/old.py", is_new=False),
    )


@pytest.mark.parametrize(
    ("shown", "is_shown"),
    [
        (call("read_file", "1|x", path="a/b.py"), True),
        (call("read_file", "1|x", path="a/c.py"), False),
        (call("grep", "a/b.py:3: x = 1", pattern="x"), True),
        (call("grep", "no match", pattern="a/b.py"), False),
        (run("sed -n 1,20p a/b.py", "x"), True),
        (run("echo a/b.py", "a/b.py"), False),
        (run("touch a/b.py", ""), False),
    ],
)
def test_a_file_is_shown_by_calls_that_print_its_lines(
    shown: rollout_pb2.CallRecord, *, is_shown: bool
) -> None:
    assert transcript.shows_file(shown, "a/b.py") is is_shown


def test_lints_and_todos_are_read_off_the_results() -> None:
    edit = call("search_replace", "Changed a.py:\n…\nNew lints:\na.py:1:8: F401 x", path="a.py")
    assert transcript.has_lints(edit, "a.py")
    assert not transcript.has_lints(edit, "b.py")
    assert transcript.reports_lints(call("read_lints", "No new lints.", paths=["a.py"]), "a.py")
    assert transcript.reports_lints(call("read_lints", "No new lints.", paths="b.py\na.py"), "a.py")
    assert not transcript.reports_lints(call("read_lints", "No new lints.", paths="b.py"), "a.py")
    assert transcript.count_open_todos(call("todo_write", "3 todos, 2 open:\n[ ] a: b")) == 2
    assert transcript.count_open_todos(call("todo_write", "The list is empty.")) == 0
    assert transcript.count_open_todos(call("read_file", "3 todos, 2 open:")) is None


@given(
    name=st.sampled_from(sorted(transcript.EDITS | {"run_terminal", "read_lints", "todo_write"})),
    arguments=st.text() | st.dictionaries(st.text(max_size=8), st.text()).map(json.dumps),
    result=st.text(),
)
def test_no_arguments_of_a_policy_are_an_error(name: str, arguments: str, result: str) -> None:
    record = rollout_pb2.CallRecord(name=name, arguments_json=arguments, result=result)
    transcript.edits(record)
    transcript.shows_file(record, "a.py")
    transcript.reports_lints(record, "a.py")
    assert transcript.read_test_outcome(record) in {True, False, None}
    assert transcript.count_open_todos(record) in {None, 0} or result
