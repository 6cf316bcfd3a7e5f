"""Manifests on the pages are what the API takes: each block of YAML, whole or in part."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml

from etude.common.api.lint.linter import KINDS, LintFinding, lint_text
from etude.envserver.images.spec import ImageSpec

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "etude"
CHART_VALUES: "Document" = yaml.safe_load((CHART / "values.yaml").read_text())
VALUES_SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GOOD = yaml.safe_load((ROOT / "tests" / "cluster" / "bad_manifests.yaml").read_text())["good"]
OTHERS = ("keda.sh/v1alpha1",)
"""APIs that are not ours; tests/unit/operator/integrations/test_keda_scaler.py reads that one."""

Document = dict[str, Any]


class Block(NamedTuple):
    """One document of one block of YAML."""

    page: str
    content: Document

    @property
    def where(self) -> str:
        return f"{self.page}: {', '.join(map(str, self.content))}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            for content in yaml.safe_load_all(text):
                if isinstance(content, dict):  # a list is a part of what others take
                    yield Block(str(page.relative_to(ROOT)), content)


def below_spec(content: Document) -> Document:
    """A part of a manifest as what stands below its spec."""
    if set(content) == {"poolTemplate"}:
        return dict(content["poolTemplate"])
    return dict(content["spec"]) if set(content) == {"spec"} else content


def kind_of(part: Document) -> str:
    """The kind whose spec has all of these fields; a run where several have.

    Raises:
        AssertionError: there is none.
    """
    for name, kind in KINDS.items():
        if part.keys() <= {field.alias for field in kind.spec.model_fields.values()}:
            return name
    raise AssertionError(f"no kind has all of {', '.join(part)}")


def good(kind: str) -> Document:
    """A manifest that documented parts are put into; a pool's says no more than it must."""
    whole: Document = yaml.safe_load(GOOD[kind])
    if kind == "EnvPool":
        whole["spec"] = {"templates": whole["spec"]["templates"]}
    return whole


def merged(base: Any, part: Any) -> Any:
    """What is documented in place of, or beside, what a good manifest has."""
    if not isinstance(base, dict) or not isinstance(part, dict):
        return part
    return {**base, **{key: merged(base.get(key), value) for key, value in part.items()}}


def findings(content: Document) -> list[LintFinding]:
    if content.get("kind") in KINDS:
        return lint_text(json.dumps(content), name="page")
    part = below_spec(content)
    whole = merged(good(kind_of(part)), {"spec": part})
    found = lint_text(json.dumps(whole), name="page")
    # A part of a list's item leaves out what it is not about.
    return [each for each in found if not each.what.endswith("is missing")]


@pytest.mark.parametrize("block", list(blocks()), ids=lambda block: block.where)
def test_a_documented_manifest_is_taken(block: Block) -> None:
    if "base" in block.content:
        ImageSpec.model_validate(block.content)
        return
    if block.content.get("apiVersion") in OTHERS:
        return
    if block.content.keys() <= CHART_VALUES.keys():
        jsonschema.Draft7Validator(VALUES_SCHEMA).validate(merged(CHART_VALUES, block.content))
        return
    assert [each.text() for each in findings(block.content)] == []
