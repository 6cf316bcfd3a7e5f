"""Lint says what is wrong, where, and how to put it right."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.common.api.lint.linter import LintFinding, lint_bytes, lint_text

BAD = yaml.safe_load((Path(__file__).parents[2] / "cluster" / "bad_manifests.yaml").read_text())
"""Manifests that the cluster tests give to an API server too."""

POOL = """\
apiVersion: etude.dev/v1alpha1
kind: EnvPool
metadata:
  name: repos
spec:
  templates:
  - name: python
"""

RUN = """\
apiVersion: etude.dev/v1alpha1
kind: RLRun
metadata: {name: demo}
spec:
  model: {uri: s3://bucket/model}
  storage: {uri: s3://bucket/run}
  phases:
  - name: rl
    type: ReinforcementLearning
    maxSteps: 40
    optimizer: {learningRate: "4.5e-4"}
    tasks:
    - {name: train, uri: s3://bucket/tasks, environment: repos}
    algorithm:
      name: DrGRPO
  roles:
    inference: {}
    environments:
    - name: repos
      template: python
      poolTemplate:
        templates: [{name: python}]
    rewards:
      functions:
      - {name: success, function: Verifier}
"""


def findings(text: str) -> list[LintFinding]:
    return lint_text(text, name="run.yaml")


def only(text: str) -> LintFinding:
    found = findings(text)
    assert len(found) == 1, [each.text() for each in found]
    return found[0]


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def test_a_good_manifest_has_no_findings() -> None:
    assert findings(RUN) == []
    assert findings(POOL) == []


def test_a_finding_reads_as_place_problem_and_way_out() -> None:
    finding = only(changed(RUN, "maxSteps: 40", "maxSteps: 0"))
    assert finding.text() == (
        "run.yaml:10:15  spec.phases[0].maxSteps is 0; the least is 1\n"
        "  fix: set maxSteps to a whole number from 1 to 10000000  [InvalidSpec]"
    )


@pytest.mark.parametrize(
    ("old", "new", "place", "what", "fix"),
    [
        ("maxSteps:", "maxStep:", "10:5", "maxStep is no field", "did you mean maxSteps?"),
        ("maxSteps: 40", "max_steps: 40", "10:5", "no field", "did you mean maxSteps?"),
        ("maxSteps: 40", 'maxSteps: "40"', "10:15", 'the text "40"', "write maxSteps: 40"),
        ("maxSteps: 40", "maxSteps: 4.5", "10:15", "is 4.5", "whole number"),
        ('"4.5e-4"', "4.5e-4", "11:31", "0.00045 without quotes", 'learningRate: "0.00045"'),
        ('"4.5e-4"', '"fast"', "11:31", '"fast", which is not a decimal', "write a decimal"),
        (
            "storage: {uri: s3://bucket/run}",
            "storage: {}",
            "6:12",
            "uri is missing",
            "add uri: s3:",
        ),
        ("model: {uri: s3://bucket/model}", "model: {}", "5:10", "exactly one of", "keep uri"),
        ("s3://bucket/run", "gs://bucket/run", "6:18", "is not s3://bucket/prefix", "file:///"),
        ("ReinforcementLearning", "Reinforcementlearning", "9:11", "none of", "did you mean Re"),
        ("DrGRPO", "Reinforce", "15:13", "none of DrGRPO", "write one of DrGRPO, GRPO, RLOO, PPO"),
        ("name: demo", "name: Demo", "3:18", '"Demo"', "lower-case letters"),
        ("name: demo", f"name: {'a' * 41}", "3:18", "41 characters; the most is 40", "at most 40"),
        ("name: demo}", "name: demo, lables: {}}", "3:24", "no field", "did you mean labels?"),
        ("kind: RLRun", "kind: RLrun", "2:7", "none of RLRun", "did you mean RLRun?"),
        ("v1alpha1", "v1", "1:13", "RLRun is in etude.dev/v1alpha1", "etude.dev/v1alpha1"),
        ("inference: {}", "inference: []", "17:16", "is a list", "mapping"),
        ("environment: repos", "environment: repo", "8:3", "must name an entry", "add one"),
        ("    inference: {}\n", "", "17:5", "needs roles.inference", "add the roles"),
    ],
)
def test_one_mistake_gives_one_finding(old: str, new: str, place: str, what: str, fix: str) -> None:
    text = changed(RUN, old, new)
    matching = [each for each in findings(text) if what in each.what]
    assert len(matching) == 1, [each.text() for each in findings(text)]
    (finding,) = matching
    assert f"{finding.position.line}:{finding.position.column}" == place
    assert fix in finding.fix


@pytest.mark.parametrize("endpoint", ["http://", "http:///x", "127.0.0.1:9000", "http://h/x"])
def test_an_endpoint_that_no_role_could_use_is_found_before_a_run_starts(endpoint: str) -> None:
    stored = f"storage: {{uri: s3://bucket/run, endpoint: '{endpoint}'}}"
    (finding,) = lint_text(RUN.replace("storage: {uri: s3://bucket/run}", stored), name="run.yaml")
    assert finding.field == "spec.storage.endpoint"
    assert "scheme, host and port alone" in finding.fix


@pytest.mark.parametrize("host", ["10.0.0.1", "'[::1]'", "'2606:4700::1'", "localhost"])
def test_an_address_in_the_place_of_a_host_is_told_what_to_list(host: str) -> None:
    rules = f"rules: [{{name: index, host: {host}}}]"
    (finding,) = lint_text(f"{POOL}  network: {{egress: Custom, {rules}}}\n", name="pool.yaml")
    assert finding.field == "spec.network.rules[0].host"
    assert "a host's name, such as pypi.org" in finding.fix
    assert "addresses are refused" in finding.fix


def test_a_field_that_belongs_elsewhere_is_told_its_home() -> None:
    finding = only(changed(RUN, "maxSteps: 40", "maxSteps: 40\n    maxTurns: 3"))
    assert finding.fix == "it belongs at spec.phases[].rollout.maxTurns"


def test_a_broken_rule_is_told_with_the_value_that_breaks_it() -> None:
    finding = only(
        changed(RUN, "algorithm:", "asyncLimits: {maxStalenessVersions: 4}\n    algorithm:")
    )
    assert finding.what.startswith("spec.phases[0].asyncLimits.maxStalenessVersions is 4: mode Sy")
    assert finding.fix == "set mode: FullyAsync, or maxStalenessVersions: 0"


def test_a_name_given_twice_is_found_at_the_second() -> None:
    finding = only(changed(POOL, "  - name: python\n", "  - name: python\n  - name: python\n"))
    assert finding.position.line == 8
    assert "given twice" in finding.what


def test_a_parameter_of_no_algorithm_is_found() -> None:
    finding = only(changed(RUN, "DrGRPO", "DrGRPO\n      parameters: {clipHi: 0.3}"))
    assert finding.reason == "InvalidParameters"
    assert "clipHi is no parameter of DrGRPO" in finding.what
    assert finding.fix == "did you mean clipHigh?"


def test_more_updates_than_groups_of_a_step_are_found() -> None:
    finding = only(changed(RUN, "DrGRPO", "DrGRPO\n      parameters: {updatesPerBatch: 64}"))
    assert finding.field == "spec.phases[0].algorithm.parameters.updatesPerBatch"
    assert "64 updates cannot share" in finding.what
    assert "or raise promptsPerStep" in finding.fix


def test_replay_that_does_not_fit_the_updates_of_a_batch_is_found() -> None:
    finding = only(changed(RUN, "DrGRPO", "GSPO\n    routerReplay: {mode: Recorded}"))
    assert finding.field == "spec.phases[0].routerReplay.mode"
    assert "4 updates per batch move away" in finding.what
    assert finding.fix == "set Recompute"


@pytest.mark.parametrize(
    ("inference", "what"),
    [
        ("{gpusPerReplica: 1}", "graphs of engines on GPUs record no experts"),
        ("{gpusPerReplica: 2, engine: {pipelineParallel: 2}}", "one group of layers"),
        ("{gpusPerReplica: 2, engine: {dataParallel: 2}}", "one copy"),
    ],
)
def test_replay_of_engines_that_cannot_record_is_found(inference: str, what: str) -> None:
    replayed = changed(RUN, "DrGRPO", "DrGRPO\n    routerReplay: {}")
    finding = only(changed(replayed, "inference: {}", f"inference: {inference}"))
    assert finding.field == "spec.phases[0].routerReplay.mode"
    assert what in finding.what
    eager = "{gpusPerReplica: 1, engine: {engineArgs: {enforce_eager: true}}}"
    assert not findings(changed(replayed, "inference: {}", f"inference: {eager}"))


def test_a_parameter_that_sits_one_level_up_is_told_so() -> None:
    finding = only(changed(RUN, "DrGRPO", "DrGRPO\n      parameters: {groupsize: 4}"))
    assert finding.fix == (
        "did you mean groupSize? It sits one level up: spec.phases[0].algorithm.groupSize"
    )


def test_a_parameter_of_no_reward_function_is_found() -> None:
    finding = only(changed(RUN, "function: Verifier", "function: Verifier, parameters: {x: 1}"))
    assert "x is no parameter of Verifier" in finding.what


@pytest.mark.parametrize("name", ["[DrGRPO]", "{a: 1}", "3"])
def test_a_name_that_is_no_text_is_refused_by_the_schema_alone(name: str) -> None:
    text = changed(RUN, "name: DrGRPO", f"name: {name}\n      parameters: {{clipHi: 0.3}}")
    assert {each.reason for each in findings(text)} == {"InvalidSpec"}
    text = changed(RUN, "function: Verifier", f"function: {name}, parameters: {{x: 1}}")
    assert {each.reason for each in findings(text)} == {"InvalidSpec"}


def test_parameters_are_judged_even_when_the_spec_is_wrong() -> None:
    text = changed(RUN, "DrGRPO", "DrGRPO\n      parameters: {clipHi: 0.3}")
    reasons = [each.reason for each in findings(changed(text, "maxSteps: 40", "maxSteps: 0"))]
    assert reasons == ["InvalidSpec", "InvalidParameters"]


@pytest.mark.parametrize(
    ("entry", "field", "fix"),
    [
        ('cron: "0 0 30 2 *"', "cron", "name a day that does"),
        ('cron: "0 8 * * *", timeZone: Mars/Base', "timeZone", 'name one such as "Europe/Berlin"'),
    ],
)
def test_a_moment_that_never_comes_is_found_in_a_pool_and_in_a_run(
    entry: str, field: str, fix: str
) -> None:
    scaling = f"autoscaling: {{mode: Reactive, schedule: [{{{entry}, minIdle: 1}}]}}"
    for text, before, path in (
        (POOL, "spec:\n  ", "spec"),
        (RUN, "poolTemplate:\n        ", "spec.roles.environments[0].poolTemplate"),
    ):
        _, gap = before.split(":")
        finding = only(changed(text, before, f"{before}maxReplicas: 4{gap}{scaling}{gap}"))
        assert finding.reason == "InvalidParameters"
        assert finding.what.startswith(f"{path}.autoscaling.schedule[0].{field}: ")
        assert finding.fix == fix


def test_all_problems_of_a_file_come_at_once_in_its_order() -> None:
    text = changed(changed(RUN, "maxSteps: 40", "maxSteps: 0"), "name: demo", "name: Demo")
    broken_pool = changed(POOL, "name: python", "nam: python")
    found = findings(f"{text}---\n{broken_pool}")
    assert [each.position.line for each in found] == [3, 10, 33, 33]


def test_every_problem_of_one_list_is_told_and_its_length_is_not() -> None:
    text = changed(POOL, "  - name: python", "  - name: Python\n  - nam: x")
    assert not any("items" in each.what for each in findings(text))


def test_an_object_of_another_group_is_left_alone() -> None:
    assert findings(f"apiVersion: v1\nkind: Secret\ndata: 5\n---\n{POOL}") == []


def test_a_field_that_is_null_counts_as_absent_as_it_does_for_the_api_server() -> None:
    assert findings(changed(RUN, "maxSteps: 40", "maxSteps: 40\n    seed: null")) == []
    assert "maxSteps is missing" in only(changed(RUN, "maxSteps: 40", "maxSteps: null")).what


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_a_file_without_objects_is_a_finding(text: str) -> None:
    assert "holds no object" in only(text).what


@pytest.mark.parametrize("text", ["5", "[a, b]", "text"])
def test_a_document_that_is_no_object_is_a_finding(text: str) -> None:
    assert "an object is a mapping" in only(text).what


def test_missing_parts_of_the_object_are_findings() -> None:
    found = findings("apiVersion: etude.dev/v1alpha1\nkind: EnvPool\nspce: {}\n")
    assert [each.field for each in found] == ["metadata", "spec", "spce"]
    assert found[2].fix == "did you mean spec?"


def test_bytes_that_are_no_text_are_a_finding() -> None:
    (finding,) = lint_bytes(b"\xff\xfe", name="run.yaml")
    assert finding.reason == "InvalidYaml"


def test_what_every_wrong_type_reads_like_is_never_empty() -> None:
    wrong: list[object] = [None, True, 1, 1.5, "x", [], {}, [1], {"x": 1}]
    base: Mapping[str, Any] = yaml.safe_load(RUN)
    for value in wrong:
        spec = dict.fromkeys(base["spec"], value)
        for finding in findings(yaml.safe_dump({**base, "spec": spec})):
            assert finding.what
            assert finding.fix


@pytest.mark.parametrize("case", BAD["cases"], ids=lambda case: str(case["about"]))
def test_a_bad_manifest_is_refused_for_its_field_and_rule(case: Mapping[str, str]) -> None:
    good = BAD["good"][case["of"]]
    assert findings(good) == []
    found = findings(good.replace(case["old"], case["new"]))
    assert any(each.field.startswith(case["field"]) for each in found), found
    assert any(case.get("rule", "") in each.what for each in found), found


def test_the_largest_transcript_may_be_as_long_as_the_engine_takes() -> None:
    small = changed(RUN, "inference: {}", "inference: {maxModelLen: 512}")
    assert findings(changed(small, "DrGRPO", "DrGRPO\n    rollout: {maxTokens: 512}")) == []
    assert "must not be above roles.inference.maxModelLen" in only(small).what
