"""Curricula in manifests: those of an installed package are checked before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.installed_package import install_package

from etude.common.api.lint.linter import lint_text

ROOT = Path(__file__).parents[3]
GOOD = yaml.safe_load((ROOT / "tests" / "cluster" / "bad_manifests.yaml").read_text())["good"]
SOURCE = """
from etude.common.api.meta import Model

class Parameters(Model):
    steps: int = 1

class Ladder:
    parameters = Parameters

LADDER, NONE = Ladder(), 42
"""
AT = "spec.phases[1].curriculum"


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "etude.curricula": {
            "acme.Ladder": "acme_lint:LADDER",
            "acme.None": "acme_lint:NONE",
            "acme.Absent": "acme_lint:ABSENT",
        }
    }
    install_package(tmp_path, monkeypatch, name="acme_lint", source=SOURCE, entries=entries)


def findings(curriculum: Any) -> list[str]:
    run = yaml.safe_load(GOOD["RLRun"])
    run["spec"]["phases"][1]["curriculum"] = curriculum
    return [str(each) for each in lint_text(json.dumps(run), name="run")]


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("curriculum", "field", "words"),
    [
        ({"name": "Ladder"}, f"{AT}.name", "SolveRateBand, or a name like acme.Ladder"),
        ({"name": 3}, f"{AT}.name", ""),
        ({"name": "SolveRateBand", "parameters": {"goal": "1"}}, f"{AT}.parameters.goal", ""),
        (
            {"name": "SolveRateBand", "parameters": {"target": "half"}},
            f"{AT}.parameters.target",
            "",
        ),
        ({"name": "acme.Ladder", "parameters": {"steps": "x"}}, f"{AT}.parameters.steps", ""),
        ({"name": "acme.None"}, f"{AT}.name", "has no model of its parameters"),
        ({"name": "acme.Absent"}, f"{AT}.name", "acme_lint:ABSENT"),
    ],
)
def test_a_bad_curriculum_is_refused_with_its_field(
    curriculum: Any, field: str, words: str
) -> None:
    found = findings(curriculum)
    assert any(field in each and words in each for each in found), found


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    "curriculum",
    [
        {"name": "SolveRateBand"},
        {"name": "SolveRateBand", "parameters": {"target": "0.3"}},
        {"name": "acme.Ladder", "parameters": {"steps": 3}},
        {"name": "elsewhere.Installed", "parameters": {"any": "thing"}},
    ],
)
def test_a_curriculum_that_fits_or_is_installed_elsewhere_has_no_finding(curriculum: Any) -> None:
    assert findings(curriculum) == []
