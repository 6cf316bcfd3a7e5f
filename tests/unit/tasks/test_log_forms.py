"""Logs of test runners other than pytest, as their programs print them."""

import json

import pytest

from etude.envserver.tasks.formats.log_forms import READERS

_CARGO = """\
   Compiling itoa v1.0.9 (/workspace)
    Finished test [unoptimized + debuginfo] target(s) in 2.56s
     Running unittests src/lib.rs (target/debug/deps/itoa-1f69e4f09e60afd7)

running 0 tests

     Running tests/test.rs (target/debug/deps/test-1f69e4f09e60afd7)

running 3 tests
test test_i128_min ... ok
test test_max - should panic ... FAILED
test inner::test_slow ... ignored

failures:

---- test_max stdout ----
test test_max ... is no line of a result
"""
_TAP = """\
TAP version 13
# quotes
ok 1 should be equal
not ok 2 should be equal
  ---
    operator: equal
    expected: 1
  ...
# words # and more
ok 3 should be equal
ok 4 - later # SKIP not here
1..4
# tests 4
# pass  3
"""
_NODE = """\
TAP version 13
# Subtest: cart
    # Subtest: adds
    ok 1 - adds
      ---
      duration_ms: 0.4
      ...
    1..1
not ok 1 - cart
"""


def test_cargos_tests_are_named_by_the_source_of_their_program() -> None:
    assert READERS["cargo"](_CARGO) == {
        "tests/test.rs::test_i128_min": "PASSED",
        "tests/test.rs::test_max": "FAILED",
        "tests/test.rs::inner::test_slow": "SKIPPED",
    }


def test_points_of_one_name_are_numbered_below_the_comment_before_them() -> None:
    assert READERS["tap"](_TAP) == {
        "quotes > should be equal #1": "PASSED",
        "quotes > should be equal #2": "FAILED",
        "words # and more > should be equal #1": "PASSED",
        "words # and more > later #1": "SKIPPED",
    }
    assert READERS["tap"](_NODE) == {"adds > adds #1": "PASSED", "adds > cart #1": "FAILED"}


def test_gos_events_count_by_package_and_anything_else_in_the_log_does_not() -> None:
    events = [
        {"Action": "run", "Package": "a/b", "Test": "TestX"},
        {"Action": "output", "Package": "a/b", "Test": "TestX", "Output": "x\n"},
        {"Action": "pass", "Package": "a/b", "Test": "TestX", "Elapsed": 0},
        {"Action": "fail", "Package": "a/c", "Test": "TestX/sub"},
        {"Action": "skip", "Package": "a/c", "Test": "TestY"},
        {"Action": "fail", "Package": "a/c"},
    ]
    log = "\n".join(
        ["# a/d", "go: no such", *map(json.dumps, events), "{broken", "[1]", '{"a": 1}']
    )
    assert READERS["go"](log) == {
        "a/b::TestX": "PASSED",
        "a/c::TestX/sub": "FAILED",
        "a/c::TestY": "SKIPPED",
    }


@pytest.mark.parametrize("form", sorted(READERS))
@pytest.mark.parametrize("log", ["", "\n\n", "ok", "{" * 5_000, "not ok", "test  ... ok"])
def test_a_log_without_results_or_with_nonsense_is_read_to_its_end(form: str, log: str) -> None:
    assert set(READERS[form](log).values()) <= {"PASSED", "FAILED", "SKIPPED"}
