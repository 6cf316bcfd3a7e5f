"""Everything that the chart renders and the operator makes, judged by kubeconform."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.support import needs
from tests.support.chart import helm
from tests.support.chart.helm import ROOT
from tests.support.chart.renders import Render, renders

from etude.common.api import yaml_documents
from etude.common.api.schema import crd
from etude.operator.builders.platform import Platform
from etude.operator.commands.render import render_children

KUBERNETES = "1.36.0"
FOREIGN = "PodMonitor,PrometheusRule"
"""Kinds of the Prometheus Operator, whose schemas nobody bundles."""
RAY_CLUSTERS = ROOT / "tests" / "data" / "crds" / "kuberay" / "rayclusters.yaml"
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.yaml")
    if any(f"kind: {kind.name}\n" in path.read_text() for kind in crd.KINDS)
)
ELSEWHERE = "/api/_definitions.json"
REFERENCE = re.compile(r'#/\$defs/([^"]+)"')
BUNDLED = (
    *("serviceaccount-v1.json", "service-v1.json", "configmap-v1.json", "pod-v1.json"),
    *("secret-v1.json", "deployment-apps-v1.json", "statefulset-apps-v1.json", "job-batch-v1.json"),
    *(f"{kind}-rbac-v1.json" for kind in ("role", "rolebinding", "clusterrole")),
    *("clusterrolebinding-rbac-v1.json", "poddisruptionbudget-policy-v1.json"),
    *("networkpolicy-networking-v1.json", "customresourcedefinition-apiextensions-v1.json"),
    *(
        "daemonset-apps-v1.json",
        "validatingadmissionpolicy-admissionregistration-v1.json",
        "flowschema-flowcontrol-v1.json",
    ),
    "validatingadmissionpolicybinding-admissionregistration-v1.json",
    "prioritylevelconfiguration-flowcontrol-v1.json",
)
"""Kinds of Kubernetes that we make, as files of schemas."""
IMAGES = dict.fromkeys(
    ("trainer", "inference", "rewards", "envserver", "operator", "gateway", "feedback"), "a/b:1"
)


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubernetes' schemas and ours, each with all that it refers to, as kubeconform wants them."""
    folder = tmp_path_factory.mktemp("schemas")
    bundled = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    source = bundled / f"v{KUBERNETES}-local-strict"
    definitions = json.loads((source / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    for name in BUNDLED:
        text = (source / name).read_text(encoding="utf-8").replace(f"{ELSEWHERE}#", "#")
        schema = json.loads(text)
        schema["$defs"] = dict(referred(text, definitions))
        (folder / name).write_text(json.dumps(schema), encoding="utf-8")
    ray = yaml.safe_load(RAY_CLUSTERS.read_text(encoding="utf-8"))
    schema = ray["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    (folder / "raycluster-ray-v1.json").write_text(json.dumps(schema), encoding="utf-8")
    for kind in crd.KINDS:
        root = crd.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        name = f"{kind.name.lower()}-etude-v1alpha1.json"
        (folder / name).write_text(json.dumps(strict(root)), encoding="utf-8")
    return folder


def referred(text: str, definitions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every definition that a schema needs, by way of others too."""
    left, seen = [text], set[str]()
    while left:
        for name in set(REFERENCE.findall(left.pop())) - seen:
            seen.add(name)
            inner = json.dumps(definitions[name]).replace(f"{ELSEWHERE}#", "#")
            left.append(inner)
            yield name, json.loads(inner)


def strict(node: Any) -> Any:
    """A structural schema as JSON Schema, in which nothing unknown may stand."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {key: strict(value) for key, value in node.items() if not key.startswith("x-")}
    kept = {key: each for key, each in kept.items() if not isinstance(each, bool)}
    return kept | {"additionalProperties": False} if kept.get("properties") else kept


def judged(schemas: Path, text: str) -> Mapping[str, Any]:
    """What kubeconform says to manifests."""
    program = helm.tool("kubeconform")
    if not program.exists():
        needs.skip("no kubeconform: `python hack/testbed/build.py` builds it", "cluster")
    where = f"{schemas}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    words = ("-strict", "-summary", "-output", "json", "-schema-location", where, "-skip", FOREIGN)
    done = subprocess.run(
        (str(program), *words, "-"),
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("render", list(renders()), ids=lambda render: render.name)
def test_every_render_conforms(schemas: Path, render: Render) -> None:
    done = helm.template(render.values, *render.words)
    assert done.returncode == 0, done.stderr
    found = judged(schemas, done.stdout)
    assert found["resources"] == [], found["resources"]
    assert found["summary"]["valid"] > 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_and_what_becomes_of_it_conform(schemas: Path, path: Path) -> None:
    given = [each.value for each in yaml_documents.parse_documents(path.read_bytes())]
    platform = Platform(images=IMAGES, namespace="etude-system", allows_weak_isolation=True)
    made = [
        child
        for each in given
        if isinstance(each, dict) and each["kind"] in {"RLRun", "EnvPool"}
        for child in render_children(each, platform)
    ]
    # As JSON: PyYAML leaves "1e-3" without quotes, which kubeconform reads as a number.
    found = judged(schemas, "\n---\n".join(map(json.dumps, [*given, *made])))
    assert found["resources"] == [], found["resources"]
    assert found["summary"]["valid"] == len(given) + len(made)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"replicas": "two"}, "/spec/replicas"),
        ({"replcias": 2}, "replcias"),
        ({"slotsPerReplica": 0}, "/spec/slotsPerReplica"),
        ({"isolation": {"driver": "Docker"}}, "/spec/isolation/driver"),
    ],
)
def test_what_does_not_conform_is_named(schemas: Path, change: dict[str, Any], names: str) -> None:
    spec = {"templates": [{"name": "python"}], **change}
    pool = {"apiVersion": "etude.dev/v1alpha1", "kind": "EnvPool", "metadata": {"name": "a"}}
    found = judged(schemas, json.dumps({**pool, "spec": spec}))
    assert found["summary"]["invalid"] == 1
    assert names in json.dumps(found["resources"])
