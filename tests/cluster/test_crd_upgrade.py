"""Objects of every earlier release, on a real API server whose CRDs are then upgraded."""

import copy
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.mutations import cases, schema
from tests.harness.mutations.api import Api
from tests.harness.mutations.compared import lacking
from tests.support.kube import testbeds
from tests.support.kube.testbeds import Program

from etude.common.api.schema import crd
from etude.operator.kube.rest import path_of

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "tests" / "data" / "releases"
NOW = ROOT / "helm" / "etude" / "files" / "crds"
VERSIONS = sorted(path for path in RELEASED.iterdir() if path.is_dir())
MANY = 120
"""Objects of each kind that are tried; the API server refuses more than half of them."""
SEED = 13
LIMIT_S = 60
"""The API server takes a changed CRD over a moment later."""


@pytest.fixture(scope="module")
def kubectl(plane: Mapping[str, Any]) -> Program:
    return testbeds.program(plane, "kubectl")


@pytest.fixture(scope="module")
def api(plane: Mapping[str, Any]) -> Api:
    return Api(plane)


@pytest.fixture
def namespace(kubectl: Program) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def install(kubectl: Program, folder: Path) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))
    kubectl("wait", "--for=condition=Established", "-f", str(folder), "--timeout=60s")
    testbeds.wait_until_listed(kubectl, *(path.stem for path in folder.glob("*.yaml")))


def objects(kind: crd.CrdKind) -> Iterator[dict[str, Any]]:
    """The base of a kind and changes of it, some of which no release ever took."""
    yield schema.base(kind)
    for mutation in cases.sample(cases.mutations(kind, SEED), MANY, SEED):
        if mutation.steps[0] == "spec" and len(cases.dumped(mutation.body())) < 20_000:
            yield mutation.body()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_objects_of_an_earlier_release_are_read_and_written_by_this_one_without_loss(
    kubectl: Program, api: Api, namespace: str, version: Path
) -> None:
    install(kubectl, version)
    before: list[dict[str, Any]] = []
    for kind in crd.KINDS:
        if not (version / f"{kind.plural}.yaml").exists():
            continue
        taken = 0
        for number, body in enumerate(objects(kind)):
            named = {**body, "metadata": {"name": f"o{number}", "namespace": namespace}}
            reply = api.call("POST", path_of(kind.name, namespace), cases.dumped(named))
            if reply.is_good:
                before.append(reply.body)
                taken += 1
        assert taken > 20, kind.name
    install(kubectl, NOW)
    for was in before:
        kind, name = was["kind"], was["metadata"]["name"]
        now = api.get(kind, namespace, name)
        assert list(lacking("spec", was["spec"], now["spec"])) == [], (kind, name)
        now["metadata"]["labels"] = {"team": "rl"}
        path = path_of(kind, namespace, name) + "?fieldValidation=Strict"
        written = api.call("PUT", path, json.dumps(now))
        assert written.is_good, (kind, name, written.message)
        assert written.body["spec"] == now["spec"]


def test_a_field_that_went_would_be_noticed(kubectl: Program, api: Api, namespace: str) -> None:
    install(kubectl, NOW)
    body = {**schema.base(crd.ENV_POOL), "metadata": {"name": "pool"}}
    was = api.call("POST", path_of("EnvPool", namespace), json.dumps(body)).body
    narrower = copy.deepcopy(yaml.safe_load((NOW / "envpools.yaml").read_text()))
    spec = narrower["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["health"]
    spec["x-kubernetes-validations"] = [
        rule for rule in spec["x-kubernetes-validations"] if "health" not in rule["rule"]
    ]
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=json.dumps(narrower))
    try:
        path = path_of("EnvPool", namespace, "pool")
        deadline_s = time.monotonic() + LIMIT_S
        while "health" in api.call("GET", path).body["spec"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        lost = list(lacking("spec", was["spec"], api.get("EnvPool", namespace, "pool")["spec"]))
        assert any("health" in each for each in lost)
    finally:
        install(kubectl, NOW)


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_kubectl_explains_every_field(kubectl: Program, kind: crd.CrdKind) -> None:
    install(kubectl, NOW)
    root = crd.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for part in ("spec", "status"):
        text = kubectl("explain", f"{kind.name.lower()}.{part}", "--recursive")
        told = [line.split("\t")[0].strip() for line in text.splitlines() if "\t<" in line]
        wanted = list(names(root["properties"][part]))
        assert sorted(told) == sorted(wanted)
    document = json.loads(kubectl("get", "--raw", "/openapi/v3/apis/etude.dev/v1alpha1"))
    published = document["components"]["schemas"][f"dev.etude.v1alpha1.{kind.name}"]
    silent = [
        path
        for part in ("spec", "status")
        for path, node in below(published["properties"][part], part)
        if len(node.get("description", "")) < 4
    ]
    assert silent == []


def names(node: Mapping[str, Any]) -> Iterator[str]:
    """Every field below a node, as `kubectl explain --recursive` lists them."""
    for name, child in node.get("properties", {}).items():
        yield name
        yield from names(child)
    for part in ("items", "additionalProperties"):
        yield from names(node[part]) if part in node else ()


def below(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A field and every field below it."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from below(child, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        for name, child in node.get(part, {}).get("properties", {}).items():
            yield from below(child, f"{path}[].{name}")
