"""Each value is documented, has an effect, and is refused by its path when it is wrong."""

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import needs
from tests.support.chart.helm import CHART, IMAGE, ROOT, SERVED, refusal, template
from tests.support.chart.value_schema import Place, places, put, schema

README = CHART / "README.md"
EFFECTS = yaml.safe_load(Path(__file__).with_name("effects.yaml").read_text())
CONTEXT: dict[str, Any] = EFFECTS["context"]
EXAMPLES: dict[str, Any] = EFFECTS["examples"]
CONTEXTS: dict[str, Any] = EFFECTS["contexts"]
ELSEWHERE: list[str] = EFFECTS["elsewhere"]
PLACES = [place for place in places() if place.path != ("global",)]
"""`global` is Helm's own: charts share it, and ours reads nothing of it."""
DEFAULTED = [place for place in PLACES if place.has_default]
NAMED = [place for place in PLACES if place.node.get("additionalProperties") is False]
LIMITED = [place for place in PLACES if place.beyond is not None]
VALUES = [place.name for place in PLACES if place.is_value]


@pytest.fixture(scope="module")
def mistyped() -> str:
    """What Helm says to values of wrong types: all that do not lie in each other, at once."""
    said = []
    for depth in range(1, 1 + max(len(place.path) for place in PLACES)):
        values: dict[str, Any] = {"image": IMAGE}
        for place in PLACES:
            if len(place.path) == depth:
                put(values, place.path, place.wrong)
        said.append(refusal(values))
    return "\n".join(said)


@pytest.fixture(scope="module")
def removed() -> str:
    """What Helm says to null in place of values: it takes the chart's own away."""
    said = []
    for depth in range(1, 1 + max(len(place.path) for place in DEFAULTED)):
        values: dict[str, Any] = {}
        for place in DEFAULTED:
            if len(place.path) == depth:
                put(values, place.path, None)
        said.append(refusal(values))
    return "\n".join(said)


@pytest.fixture(scope="module")
def misspelt() -> str:
    """What Helm says to values under names that are almost right."""
    values: dict[str, Any] = {"image": IMAGE}
    for place in (Place((), schema()), *NAMED):
        for name in place.node["properties"]:
            put(values, (*place.path, almost(name)), 1)
    return refusal(values)


@pytest.fixture(scope="module")
def exceeding() -> str:
    """What Helm says to values beyond their limits."""
    values: dict[str, Any] = {}
    for place in LIMITED:
        put(values, place.path, place.beyond)
    return refusal(values)


def almost(name: str) -> str:
    return f"{name}x"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.pointer)
def test_a_value_of_the_wrong_type_is_refused_by_its_path(place: Place, mistyped: str) -> None:
    assert f"at '{place.pointer}':" in mistyped


@pytest.mark.parametrize("place", DEFAULTED, ids=lambda place: place.pointer)
def test_a_value_that_is_taken_away_is_refused_by_its_path(place: Place, removed: str) -> None:
    above = "".join(f"/{part}" for part in place.path[:-1])
    found = re.findall(rf"at '{above}': missing propert(?:y|ies) (.*)", removed)
    assert place.path[-1] in {word for line in found for word in re.findall(r"'(\w+)'", line)}


@pytest.mark.parametrize("place", NAMED, ids=lambda place: place.pointer)
def test_a_misspelt_value_is_refused_by_its_path_and_name(place: Place, misspelt: str) -> None:
    found = re.findall(rf"at '{place.pointer}': additional properties (.*) not allowed", misspelt)
    assert found, place.pointer
    words = set(re.findall(r"'(\w+)'", found[0]))
    assert words == {almost(name) for name in place.node["properties"]}


def test_a_misspelt_group_of_values_is_refused(misspelt: str) -> None:
    found = re.findall(r"at '': additional properties (.*) not allowed", misspelt)
    names = {almost(name) for name in schema()["properties"]}
    assert set(re.findall(r"'(\w+)'", found[0])) == names


@pytest.mark.parametrize("place", LIMITED, ids=lambda place: place.pointer)
def test_a_value_beyond_its_limits_is_refused_by_its_path(place: Place, exceeding: str) -> None:
    assert f"at '{place.pointer}':" in exceeding


def test_the_readme_has_a_sentence_for_each_value_of_the_schema() -> None:
    rows = dict(re.findall(r"^\| ([\w.]+) \| .*\| (.*) \|$", README.read_text(), re.MULTILINE))
    assert set(rows) - {"Key"} == set(VALUES)
    for name in VALUES:
        assert rows[name].endswith("."), name


def test_the_readme_is_made_of_the_values() -> None:
    generator = runpy.run_path(str(ROOT / "hack" / "chart_readme.py"))
    if not generator["program"](ROOT).exists():
        needs.skip("there is no helm-docs: `python hack/testbed/build.py` builds it", "cluster")
    assert README.read_text(encoding="utf-8") == generator["page"](ROOT)


@pytest.fixture(scope="module")
def everything() -> str:
    """What the chart makes when all is switched on."""
    return text_of(CONTEXT)


def text_of(values: dict[str, Any]) -> str:
    done = template(values, *SERVED)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_value_has_an_example_of_its_effect() -> None:
    assert {*EXAMPLES, *ELSEWHERE} == set(VALUES)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_value_changes_what_the_chart_makes(name: str, everything: str) -> None:
    values = copy.deepcopy(CONTEXT)
    own = next((own for start, own in CONTEXTS.items() if name.startswith(start)), None)
    if own is not None:
        values[name.partition(".")[0]] = copy.deepcopy(own)
        everything = text_of(values)
    put(values, tuple(name.split(".")), EXAMPLES[name])
    assert text_of(values) != everything
