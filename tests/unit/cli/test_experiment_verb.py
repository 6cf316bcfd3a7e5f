"""`etude experiment` as a user types it."""

import json

import pytest
from tests.support.warm_etude import etude

SIMULATE = ("experiment", "simulate", "--base", "0.6", "--effect", "0.1", "--users", "1000")


def test_the_power_of_each_rule_is_printed_before_anyone_starts() -> None:
    done = etude(*SIMULATE)
    assert done.returncode == 0, done.stderr
    assert "base 0.6, effect +0.1, 1,000 users an arm, 5 looks" in done.stdout
    assert "alpha spending" in done.stdout
    assert "mSPRT" in done.stdout


def test_programs_read_the_same_as_json() -> None:
    done = etude(*SIMULATE, "--events", "5", "--correlation", "0.2", "--json")
    rules = json.loads(done.stdout)["rules"]
    assert rules["alpha spending"]["power"] > 0.95
    assert rules["alpha spending"]["false_positives"] < 0.07


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--effect", "0.5"), "--base plus --effect  is 1.1"),
        (("--users", "100"), "--users  is 100\n  fix: give a number from 200 a look"),
        (("--looks", "0"), "--looks  is 0"),
        (("--correlation", "nan"), "--correlation  is nan"),
        (("--alpha", "1"), "--alpha  is 1"),
    ],
)
def test_a_figure_out_of_its_range_is_refused_by_name(words: tuple[str, str], problem: str) -> None:
    done = etude(*SIMULATE, *words)
    assert done.returncode == 4
    assert problem in done.stderr
