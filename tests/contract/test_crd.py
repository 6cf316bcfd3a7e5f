"""The CRDs in the chart are what the models say, and what an API server takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.common.api.lint.linter import lint_file
from etude.common.api.schema import crd

ROOT = Path(__file__).parents[2]
CRDS = ROOT / crd.CHART_FOLDER
IMAGES = ROOT / "examples" / "images"
EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*.yaml") if not path.is_relative_to(IMAGES)
)
SCHEMAS = [
    pytest.param(crd.definition(kind)["spec"]["versions"][0], id=kind.name) for kind in crd.KINDS
]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def described_parts(version: dict[str, Any]) -> dict[str, dict[str, Any]]:
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    return {
        path: node
        for part in ("spec", "status")
        for path, node in nodes(properties[part], f".{part}")
    }


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_the_chart_ships_the_crds_that_the_models_make(kind: crd.CrdKind) -> None:
    shipped = (CRDS / f"{kind.plural}.yaml").read_text(encoding="utf-8")
    assert shipped == crd.text(kind), "run `python -m etude.common.api.schema.crd`"


def test_the_chart_ships_no_other_crd() -> None:
    assert {path.stem for path in CRDS.glob("*")} == {kind.plural for kind in crd.KINDS}


@pytest.mark.parametrize("version", SCHEMAS)
def test_every_field_is_described(version: dict[str, Any]) -> None:
    silent = [
        path
        for path, node in described_parts(version).items()
        if not path.endswith(("[]", "{}")) and not node.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize("version", SCHEMAS)
def test_everything_that_grows_is_bounded(version: dict[str, Any]) -> None:
    # Without bounds the cost estimate of the CEL rules refuses the CRD at installation.
    limits = {"string": "maxLength", "array": "maxItems"}
    unbounded = [
        path
        for path, node in described_parts(version).items()
        if (node.get("type") in limits and limits[node["type"]] not in node and "enum" not in node)
        or ("additionalProperties" in node and "maxProperties" not in node)
    ]
    assert unbounded == []


@pytest.mark.parametrize("version", SCHEMAS)
def test_schemas_are_structural(version: dict[str, Any]) -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "const", "nullable", "title", "$defs"}
    for path, node in described_parts(version).items():
        assert not forbidden & node.keys(), path
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert isinstance(node.get("exclusiveMinimum", True), bool), path


@pytest.mark.parametrize("version", SCHEMAS)
def test_every_rule_has_a_message_and_points_at_a_field(version: dict[str, Any]) -> None:
    parts = described_parts(version)
    parts[""] = version["schema"]["openAPIV3Schema"]
    for path, node in parts.items():
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"]
            if "fieldPath" in rule:
                assert path + rule["fieldPath"] in parts, f"{path}: {rule['message']}"


@pytest.mark.parametrize("version", SCHEMAS)
def test_no_field_is_a_truth_value_of_yaml(version: dict[str, Any]) -> None:
    # kubectl reads YAML 1.1, in which a key `on` is the boolean true.
    words = {"y", "n", "yes", "no", "on", "off", "true", "false"}
    assert [p for p in described_parts(version) if p.rpartition(".")[2].lower() in words] == []


ORDERED = {".spec.phases", ".spec.failurePolicy.rules"}
"""Whose order means something, which a merge by name would not keep."""


@pytest.mark.parametrize("version", SCHEMAS)
def test_lists_of_named_things_are_told_apart_by_name(version: dict[str, Any]) -> None:
    for path, node in described_parts(version).items():
        if node.get("type") != "array":
            continue
        named = "name" in node["items"].get("properties", {})
        by_order = path.endswith((".phases", ".roles", ".environments")) and ".status" in path
        if named and not by_order and path not in ORDERED:
            assert node["x-kubernetes-list-map-keys"] == ["name"], path
            assert "name" in node["items"]["required"], path


@pytest.mark.parametrize("version", SCHEMAS)
def test_columns_and_selectable_fields_read_what_exists(version: dict[str, Any]) -> None:
    parts = described_parts(version)
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += [field["jsonPath"] for field in version.get("selectableFields", ())]
    for path in paths:
        if path.startswith((".spec", ".status")) and "[?" not in path:
            assert path in parts


def test_each_part_of_a_run_is_frozen_or_reaches_a_run_that_works() -> None:
    reaching = {
        "suspend",
        *("checkpointing", "evaluation", "failurePolicy", "deadlines", "observability"),
        *("budget", "network", "ttlSecondsAfterFinished", "deletionRules"),
    }
    never = {"managedBy"}
    spec = crd.definition(crd.RLRUN)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert set(spec["properties"]["spec"]["properties"]) == reaching | never | set(crd.FROZEN)
    kept = {rule["fieldPath"]: rule["rule"] for rule in spec["x-kubernetes-validations"][1:]}
    assert kept[".spec.managedBy"] == "self.spec.managedBy == oldSelf.spec.managedBy"
    same = [f"self.spec.{field} == oldSelf.spec.{field}" for field in crd.FROZEN]
    assert kept[".spec"].endswith(f" || ({' && '.join(same)})")


def test_every_kind_has_a_short_name_and_the_category() -> None:
    for kind, short in zip(crd.KINDS, ("rlr", "ckpt", "envp", "polr", "evr"), strict=True):
        names = crd.definition(kind)["spec"]["names"]
        assert names["shortNames"] == [short]
        assert names["categories"] == ["etude"]


def test_pools_scale_and_every_kind_has_a_status() -> None:
    for kind in crd.KINDS:
        subresources = crd.definition(kind)["spec"]["versions"][0]["subresources"]
        assert subresources["status"] == {}
        assert ("scale" in subresources) == (kind is crd.ENV_POOL)


def test_keys_survive_yaml_1_1() -> None:
    # `n`, `y`, `on` and `off` are booleans there; kubectl reads a key like that as `true`.
    for kind in crd.KINDS:
        assert yaml.safe_load(crd.text(kind)) == crd.definition(kind)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_passes_lint(path: Path) -> None:
    assert [finding.text() for finding in lint_file(path)] == []
