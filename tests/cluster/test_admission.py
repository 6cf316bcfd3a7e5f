"""The API server and lint give the same verdict on the same manifest."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.common.api.lint.linter import lint_text
from etude.common.api.schema import crd

ROOT = Path(__file__).parents[2]
BAD = yaml.safe_load(Path(__file__).with_name("bad_manifests.yaml").read_text(encoding="utf-8"))
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*/rlrun.yaml"))
    if "minimum: Process" not in path.read_text(encoding="utf-8")
]
"""Runs for clusters: the chart's policy refuses environments that share a node's kernel."""
SEEDS = range(400)
"""Of each kind; a request takes about 10 ms."""

pytestmark = pytest.mark.usefixtures("crds")


@pytest.mark.parametrize("kind", BAD["good"])
def test_the_good_manifests_pass_both(kubectl: Callable[..., str], kind: str) -> None:
    text = BAD["good"][kind]
    assert "created" in kubectl("apply", "--dry-run=server", "-f", "-", text=text)
    assert lint_text(text, name=kind) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_runs_in_examples_pass_both(kubectl: Callable[..., str], path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "created" in kubectl("apply", "--dry-run=server", "-f", "-", text=text)
    assert lint_text(text, name=path.parent.name) == []


@pytest.mark.parametrize("case", BAD["cases"], ids=lambda case: str(case["about"]))
def test_a_bad_manifest_is_refused_by_both_for_the_same_field(
    kubectl: Callable[..., str], case: dict[str, str]
) -> None:
    good = BAD["good"][case["of"]]
    assert good.count(case["old"]) == 1, "the case changes one place"
    text = good.replace(case["old"], case["new"])
    answer = kubectl("apply", "--dry-run=server", "-f", "-", text=text, fails=True)
    findings = lint_text(text, name="bad.yaml")
    assert case["field"] in answer
    assert any(finding.field.startswith(case["field"]) for finding in findings)
    assert case.get("rule", "") in answer
    assert any(case.get("rule", "") in finding.what for finding in findings)


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_generated_objects_get_the_same_verdict(api: Callable[..., Any], kind: crd.CrdKind) -> None:
    good = yaml.safe_load(BAD["good"][kind.name])
    schema = crd.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    path = f"/apis/etude.dev/v1alpha1/namespaces/default/{kind.plural}"
    query = "?dryRun=All&fieldValidation=Strict"
    accepted = 0
    for seed in SEEDS:
        changed = mutated(good, schema["properties"]["spec"], random.Random(seed))
        reply = api("POST", path + query, changed)
        findings = lint_text(json.dumps(changed), name="generated")
        spec_findings = [each for each in findings if each.reason != "InvalidParameters"]
        accepted += not spec_findings
        # What a platform allows is no question of what the objects may look like.
        is_refused = reply.status != 201 and "denied request" not in reply.body["message"]
        assert is_refused == bool(spec_findings), (
            f"seed {seed}: {reply.body.get('message')}\n"
            f"{[each.text() for each in findings]}\n{json.dumps(changed)}"
        )
    assert 0.2 < accepted / len(SEEDS) < 0.8, "a generator that is too tame or too wild"


def mutated(good: dict[str, Any], schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The good object with one or two changes below spec, some of them harmless."""
    changed: dict[str, Any] = json.loads(json.dumps(good))
    for _ in range(rng.choice([1, 1, 2])):
        holders = list(places(changed["spec"], schema))
        value, node = holders[rng.randrange(len(holders))]
        if isinstance(value, dict):
            change_mapping(value, node, rng)
        else:
            change_list(value, node, rng)
    return changed


def places(value: Any, node: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every mapping and list of an object, beside its schema."""
    if isinstance(value, dict) and "properties" in node:
        yield value, node
        for key, child in value.items():
            yield from places(child, node["properties"].get(key, {}))
    elif isinstance(value, list) and "items" in node:
        yield value, node
        for child in value:
            yield from places(child, node["items"])


def change_mapping(value: dict[str, Any], node: dict[str, Any], rng: random.Random) -> None:
    key = rng.choice(sorted(node["properties"]))
    match rng.randrange(12):
        case 0:
            value.pop(key, None)
        case 1:
            value[key] = None
        case 2:
            value[key.upper()] = 1
        case 3:
            value[key] = rng.choice(
                [True, -1, 2**40, 0.5, "", "x" * 5_000, [], {}, ["x"], {"x": 1}]
            )
        case _:
            value[key] = fitting(node["properties"][key], rng)


def change_list(value: list[Any], node: dict[str, Any], rng: random.Random) -> None:
    match rng.randrange(8):
        case 0 if value:
            value.pop()
        case 1 if value:
            value.append(json.loads(json.dumps(value[0])))
        case 2:
            value.append(None)
        case _:
            value.append(fitting(node["items"], rng))


def fitting(node: dict[str, Any], rng: random.Random) -> Any:
    """A value that the schema allows, often at a bound; rules may still refuse it."""
    if "enum" in node:
        return rng.choice(node["enum"])
    return FITTING.get(node.get("type", ""), fitting_map)(node, rng)


def fitting_integer(node: dict[str, Any], rng: random.Random) -> Any:
    low, high = node.get("minimum", 0), node.get("maximum", 2**31)
    outside = [low - 1, high + 1] if rng.random() < 0.1 else []
    return rng.choice(outside or [low, high, rng.randint(low, high)])


def fitting_array(node: dict[str, Any], rng: random.Random) -> Any:
    size = rng.choice([node.get("minItems", 0), 1, 2])
    return [fitting(node["items"], rng) for _ in range(size)]


def fitting_map(node: dict[str, Any], rng: random.Random) -> Any:
    fields = node.get("properties")
    if fields is None:
        return {"a": "b"}
    wanted = [key for key in fields if key in node.get("required", ()) or rng.random() < 0.3]
    return {key: fitting(fields[key], rng) for key in wanted}


def fitting_text(node: dict[str, Any], rng: random.Random) -> str:
    if rng.random() < 0.9:
        matching: list[str] = [text for text in TEXTS if re.search(node.get("pattern", ""), text)]
        return str(rng.choice(matching))[: int(node["maxLength"])]
    return rng.choice([*TEXTS, "é", "A_1.", "a\n", "1e", "a" * int(node["maxLength"] + 1)])


TEXTS = [
    *("a", "a-1", "rl", "repos", "0.5", "3e-3", "s3://b/k", "file:///x", "http://h"),
    *("hashed-1", "Standard", "Verifier", "Style", "acme.Calls", "SolveRateBand"),
    *("0 8 * * 1-5", "Europe/Berlin"),
    *("topology.kubernetes.io/zone", "a.b-1"),
    *("500m", "4Gi", "f" * 64, "*.a.org", "/a/", "amd.com/gpu", "etude.dev/operator", "Ready"),
]
FITTING = {
    "boolean": lambda _, rng: rng.random() < 0.5,
    "integer": fitting_integer,
    "string": fitting_text,
    "array": fitting_array,
}
