"""A later release takes every object that an earlier one took: the rule, and that it is judged."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.chart.crd_changes import breaks

from etude.common.api.schema import crd

RELEASED = Path(__file__).parents[1] / "data" / "releases"
EXCEPTIONS = yaml.safe_load((RELEASED / "exceptions.yaml").read_text(encoding="utf-8")) or []
VERSIONS = sorted(path for path in RELEASED.iterdir() if path.is_dir())

Crd = dict[str, Any]


def path_of(version: Path, kind: crd.CrdKind) -> Path:
    return version / f"{kind.plural}.yaml"


def released(version: Path, kind: crd.CrdKind) -> Crd:
    read: Crd = yaml.safe_load(path_of(version, kind).read_text(encoding="utf-8"))
    return read


KNOWN = [
    pytest.param(version, kind, id=f"{version.name}-{kind.name}")
    for version in VERSIONS
    for kind in crd.KINDS
    if path_of(version, kind).exists()
]
"""Kinds by the releases that have them; later kinds break nothing."""


def test_every_kind_of_a_release_is_judged() -> None:
    files = [path for version in VERSIONS for path in version.glob("*.yaml")]
    assert len(KNOWN) == len(files)


@pytest.mark.parametrize(("version", "kind"), KNOWN)
def test_nothing_that_was_accepted_is_refused_or_lost(version: Path, kind: crd.CrdKind) -> None:
    found = {
        f"{kind.name} {each}" for each in breaks(released(version, kind), crd.definition(kind))
    }
    known = tuple(
        what for each in EXCEPTIONS if each["since"] == version.name for what in each["what"]
    )
    assert {each for each in found if not each.startswith(known)} == set(), "docs/how-to/upgrade.md"


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_every_exception_is_needed_and_says_why(version: Path) -> None:
    found = {
        f"{kind.name} {each}"
        for kind in crd.KINDS
        if path_of(version, kind).exists()
        for each in breaks(released(version, kind), crd.definition(kind))
    }
    for each in EXCEPTIONS:
        needed = [what for what in each["what"] if any(one.startswith(what) for one in found)]
        assert each["since"] != version.name or needed == each["what"], each
        assert len(each["why"]) > 20, each


def fields(definition: Crd) -> Any:
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def without_a_field(pool: Crd) -> None:
    del fields(pool)["properties"]["lease"]


def with_a_field_to_give(pool: Crd) -> None:
    fields(pool)["properties"]["owner"] = {"type": "string"}
    fields(pool)["required"].append("owner")


def with_fewer_nodes(pool: Crd) -> None:
    fields(pool)["properties"]["replicas"]["maximum"] = 10


def with_a_first_node(pool: Crd) -> None:
    fields(pool)["properties"]["replicas"]["minimum"] = 1


def with_another_default(pool: Crd) -> None:
    fields(pool)["properties"]["replicas"]["default"] = 2


def with_another_type(pool: Crd) -> None:
    fields(pool)["properties"]["replicas"]["type"] = "string"


def with_a_pattern(pool: Crd) -> None:
    fields(pool)["properties"]["templates"]["items"]["properties"]["image"]["pattern"] = "^a"


def without_a_word(pool: Crd) -> None:
    fields(pool)["properties"]["isolation"]["properties"]["driver"]["enum"].remove("Firecracker")


def with_an_enumeration(pool: Crd) -> None:
    fields(pool)["properties"]["snapshotsUri"]["enum"] = ["s3://b"]


def with_a_rule(pool: Crd) -> None:
    fields(pool)["x-kubernetes-validations"].append({"rule": "self.replicas > 0", "message": "a"})


def with_another_key(pool: Crd) -> None:
    fields(pool)["properties"]["templates"]["x-kubernetes-list-map-keys"] = ["image"]


def not_served(pool: Crd) -> None:
    pool["spec"]["versions"][0]["served"] = False


def without_scale(pool: Crd) -> None:
    del pool["spec"]["versions"][0]["subresources"]["scale"]


def of_the_cluster(pool: Crd) -> None:
    pool["spec"]["scope"] = "Cluster"


def without_a_short_name(pool: Crd) -> None:
    pool["spec"]["names"]["shortNames"] = []


BREAKING = (
    *(without_a_field, with_a_field_to_give, with_fewer_nodes, with_a_first_node),
    *(with_another_default, with_another_type, with_a_pattern, without_a_word),
    *(with_an_enumeration, with_a_rule, with_another_key, not_served, without_scale),
    *(of_the_cluster, without_a_short_name),
)


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_a_change_that_breaks_somebody_is_found(change: Callable[[Crd], None]) -> None:
    before = crd.definition(crd.ENV_POOL)
    after = copy.deepcopy(before)
    change(after)
    assert len(list(breaks(before, after))) == 1


def wider(pool: Crd) -> None:
    spec = fields(pool)
    spec["properties"]["note"] = {"type": "string", "maxLength": 8}
    spec["properties"]["owner"] = {"type": "string", "default": "nobody", "maxLength": 8}
    spec["required"].append("owner")
    spec["properties"]["replicas"]["maximum"] += 1
    spec["properties"]["replicas"]["description"] = "Other words."
    spec["properties"]["isolation"]["properties"]["driver"]["enum"].append("Another")
    spec["x-kubernetes-validations"].pop()
    pool["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    pool["spec"]["versions"].append({**pool["spec"]["versions"][0], "name": "v1", "storage": False})


def test_a_change_that_only_widens_is_none() -> None:
    before = crd.definition(crd.ENV_POOL)
    after = copy.deepcopy(before)
    wider(after)
    assert list(breaks(before, after)) == []
