"""Lint speaks of every mistake in words that can be typed, and of some that no schema knows."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.common.api.lint.linter import KINDS, LintFinding, lint_text
from etude.common.api.lint.messages import PATTERN_DESCRIPTIONS
from etude.common.api.schema import crd, structural

GOOD = yaml.safe_load((Path(__file__).parents[2] / "cluster/bad_manifests.yaml").read_text())[
    "good"
]
CLAIMING = yaml.safe_load(GOOD["RLRun"])["spec"] | {
    "budget": {"gpuHours": "100"},
}
CLAIMING["roles"]["inference"]["resourceClaims"] = [
    {"name": "gpu", "resourceClaimTemplateName": "h100"}
]
MISTAKES: Mapping[str, tuple[str, str, str, str, str]] = {
    "a pattern": (
        "EnvPool",
        "spec.autoscaling",
        "{schedule: [{cron: every day, minIdle: 2}]}",
        'spec.autoscaling.schedule[0].cron is "every day"',
        "five fields of cron, such as 0 8 * * 1-5",
    ),
    "a missing field": (
        "RLRun",
        "spec.model",
        "null",
        "spec.model is missing",
        "add model: a mapping",
    ),
    "a wrong choice": (
        "RLRun",
        "spec.phases.1.type",
        "ReinforcmentLearning",
        "which is none of ContinuedPretraining",
        "did you mean ReinforcementLearning?",
    ),
    "a misspelt field": (
        "RLRun",
        "spec.phases.1.algorithm",
        "{name: DrGRPO, groupsize: 8}",
        "spec.phases[1].algorithm.groupsize is no field",
        "did you mean groupSize?",
    ),
    "a wrong type": (
        "RLRun",
        "spec.phases.1.maxSteps",
        "forty",
        'spec.phases[1].maxSteps is the text "forty", but takes a whole number',
        "write maxSteps: a whole number from 1",
    ),
    "two that exclude each other": (
        "RLRun",
        "spec.model",
        "{uri: 's3://b/m', checkpointRef: {name: x}}",
        "give exactly one of uri and checkpointRef",
        "keep uri for a model folder",
    ),
    "a store that is no address": (
        "RLRun",
        "spec.storage",
        "{uri: 's3://b/k', endpoint: 'minio:9000'}",
        'spec.storage.endpoint is "minio:9000"',
        "such as http://127.0.0.1:9000",
    ),
    "a unit of others": (
        "RLRun",
        "spec.roles.trainer",
        "{memory: 16GB}",
        'spec.roles.trainer.memory is "16GB"',
        "such as 512Mi or 4Gi",
    ),
    "a number without quotes": (
        "RLRun",
        "spec.phases.1.optimizer",
        "{learningRate: 0.001}",
        "learningRate is 0.001 without quotes",
        'write learningRate: "0.001"',
    ),
    "a pod that leaves its walls": (
        "RLRun",
        "spec.roles.trainer",
        "{podTemplate: {spec: {volumes: [{name: v, hostPath: {path: /}}]}}}",
        "spec.roles.trainer.podTemplate.spec.volumes[0].hostPath: pods see no folder",
        "remove it",
    ),
    "a variable of ours": (
        "RLRun",
        "spec.roles.trainer",
        "{env: [{name: A, value: b}, {name: ETUDE_PORT, value: '1'}]}",
        "spec.roles.trainer.env[1].name: ETUDE_PORT is set by the operator",
        "remove it",
    ),
    "a budget that would never be spent": (
        "RLRun",
        "spec",
        yaml.safe_dump(CLAIMING),
        "spec.budget.gpuHours: GPUs that come by resourceClaims are not counted",
        "gpusPerReplica",
    ),
    "a template that the run's pool has not": (
        "RLRun",
        "spec.roles.environments.0.template",
        "pyhton",
        "spec.roles.environments[0].template is pyhton, which is none of poolTemplate.templates:"
        " python",
        "write template: python",
    ),
    "more in a list than a kind's own": (
        "Checkpoint",
        "spec.reason",
        "null",
        "spec.reason is missing",
        "(Why it was written: Window is the end of a window of a phase of type Feedback)",
    ),
}


def mistaken(kind: str, at: str, value: str) -> list[LintFinding]:
    content = yaml.safe_load(GOOD[kind])
    *way, last = at.split(".")
    node: Any = content
    for part in way:
        node = node[int(part) if part.isdecimal() else part]
    node[int(last) if last.isdecimal() else last] = yaml.safe_load(value)
    return lint_text(yaml.safe_dump(content, sort_keys=False), name="mine.yaml")


@pytest.mark.parametrize("about", MISTAKES)
def test_a_mistake_is_told_with_what_where_and_how_to_put_it_right(about: str) -> None:
    kind, at, value, what, fix = MISTAKES[about]
    found = mistaken(kind, at, value)
    told = [each for each in found if what in each.what and fix in each.fix]
    assert len(told) == 1, [each.text() for each in found]
    line, _, way_out = told[0].text().partition("\n")
    assert line.startswith(f"mine.yaml:{told[0].position.line}:")
    assert way_out.startswith("  fix: ")
    assert "\n" not in way_out


def patterns(node: Mapping[str, Any], at: str) -> Iterator[tuple[str, str]]:
    """Every pattern below a schema, with the field that has it."""
    if "pattern" in node:
        yield at, node["pattern"]
    for name, child in node.get("properties", {}).items():
        yield from patterns(child, f"{at}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from patterns(node[name], f"{at}[]")


def test_no_user_is_told_to_match_a_regular_expression() -> None:
    found = {
        pattern: at
        for kind in crd.KINDS
        for at, pattern in patterns(structural.schema(KINDS[kind.name].spec), kind.name)
    }
    assert {
        at: pattern for pattern, at in found.items() if pattern not in PATTERN_DESCRIPTIONS
    } == {}
    assert PATTERN_DESCRIPTIONS.keys() - found.keys() == set(), "no field has these any more"
