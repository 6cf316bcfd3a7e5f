"""The rubric that `etude rescore` is given, and its words about the result."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.cut_demo import short_demo

from etude.cli.verbs.records.rescore import describe_correlation, read_functions
from etude.common.errors import UserError

VERIFIER = {"name": "tests", "function": "Verifier"}


def write(folder: Path, value: Any) -> Path:
    path = folder / "rubric.yaml"
    path.write_text(json.dumps(value))  # JSON is YAML
    return path


def test_a_rubric_is_of_a_list_of_functions_or_of_the_run_in_a_manifest(tmp_path: Path) -> None:
    alone = read_functions(write(tmp_path, {"functions": [VERIFIER]}))
    assert [each["function"] for each in alone] == ["Verifier"]
    demo = short_demo()
    named = [each["name"] for each in demo["spec"]["roles"]["rewards"]["functions"]]
    assert [each["name"] for each in read_functions(write(tmp_path, demo))] == named


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({}, "has 0 rubrics, not one"),
        ({"functions": [{"name": "length", "function": "LengthPenalty"}]}, "exactly one"),
        ({"functions": [VERIFIER | {"weigth": 1}]}, "functions.0.weigth"),
        ({"functions": "tests"}, "functions"),
    ],
)
def test_a_file_without_a_valid_rubric_is_refused_by_field(
    tmp_path: Path, value: Any, match: str
) -> None:
    with pytest.raises(UserError, match=match):
        read_functions(write(tmp_path, value))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml"):
        read_functions(tmp_path / "none.yaml")


def test_a_correlation_is_shown_with_its_interval_or_the_reason_that_there_is_none() -> None:
    found = {"rank_correlation": 0.5, "rank_correlation_95": [0.25, 0.75]}
    assert describe_correlation(found) == "0.500 (95 %: 0.250 to 0.750)"
    assert describe_correlation({"rank_correlation": None}).startswith("unknown")
