"""A release from its installation to its end, on a real API server."""

import http.client
import json
import shutil
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.support.kube import testbeds
from tests.support.kube.testbeds import Program

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "etude"
EFFECTS = ROOT / "tests" / "contract" / "chart" / "effects.yaml"
HOME = "etude-system"
LIMIT_S = 60
"""API servers look for new FlowSchemas every few seconds."""
CRDS = ("rlruns.etude.dev", "envpools.etude.dev", "checkpoints.etude.dev")
VALUES = {"image": "localhost/etude:1", "operator": {"nodeSelector": {"no-node": "has-this"}}}


@pytest.fixture
def kubectl(plane: Mapping[str, Any]) -> Program:
    return testbeds.program(plane, "kubectl")


@pytest.fixture
def helm(plane: Mapping[str, Any]) -> Program:
    return testbeds.program(plane, "helm")


def install(helm: Program, chart: Path = CHART, **values: Any) -> str:
    words = ("upgrade", "--install", "etude", str(chart), "--namespace", HOME, "--create-namespace")
    return helm(*words, "-f", "-", text=json.dumps({**VALUES, **values}))


def crd(kubectl: Program, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", "crd", name, "-o", "json"))
    return found


def ca(kubectl: Program) -> dict[str, str]:
    """Certificates and keys of the issuer's CAs."""
    found = json.loads(kubectl("-n", HOME, "get", "secret", "etude-ca", "-o", "json"))
    data: dict[str, str] = found["data"]
    return data


def newer(folder: Path) -> Path:
    """The chart of a later release, whose pools have one more field."""
    chart = folder / "etude"
    shutil.copytree(CHART, chart)
    file = chart / "files" / "crds" / "envpools.yaml"
    definition = yaml.safe_load(file.read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["later"] = {"type": "string", "maxLength": 8}
    file.write_text(yaml.safe_dump(definition))
    return chart


def test_runs_outlive_the_release_and_an_upgrade_brings_new_fields(
    helm: Program, kubectl: Program, tmp_path: Path
) -> None:
    told = install(helm)
    assert f"helm test etude --namespace {HOME}" in told
    kubectl("wait", "--for=condition=Established", *(f"crd/{name}" for name in CRDS))
    example = (ROOT / "examples" / "checkpoint.yaml").read_text()
    kubectl("apply", "-f", "-", text=example)
    uids = {name: crd(kubectl, name)["metadata"]["uid"] for name in CRDS}
    believed = ca(kubectl)

    install(helm, newer(tmp_path))
    assert ca(kubectl) == believed
    schema = crd(kubectl, CRDS[1])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert "later" in schema["properties"]["spec"]["properties"]

    helm("uninstall", "etude", "--namespace", HOME, "--wait")
    assert "demo-import" in kubectl("get", "ckpt")
    for kind in ("deployments,services,networkpolicies,poddisruptionbudgets", "roles,rolebindings"):
        assert kubectl("-n", HOME, "get", kind, "-o", "name") == ""
    cluster = "clusterroles,clusterrolebindings,validatingadmissionpolicies"
    assert kubectl("get", cluster, "-l", "app.kubernetes.io/name=etude", "-o", "name") == ""

    install(helm)
    assert ca(kubectl) == believed, "pods of runs would believe nobody"
    assert {name: crd(kubectl, name)["metadata"]["uid"] for name in CRDS} == uids
    assert "demo-import" in kubectl("get", "ckpt")


def test_a_further_ca_leaves_its_predecessor_as_it_was_and_none_is_skipped_or_taken_back(
    helm: Program, kubectl: Program
) -> None:
    install(helm)
    kept = ca(kubectl)
    for generation in (2, 3):
        install(helm, tls={"selfManaged": {"generation": generation}})
        before, after = f"ca-{generation - 1}", f"ca-{generation}"
        now = ca(kubectl)
        assert now.keys() == {f"{name}.{end}" for name in (before, after) for end in ("crt", "key")}
        assert {name: now[name] for name in now if name.startswith(before)} == {
            name: kept[name] for name in kept if name.startswith(before)
        }
        kept = now
    for generation in (1, 2, 5):
        values = {**VALUES, "tls": {"selfManaged": {"generation": generation}}}
        words = ("upgrade", "etude", str(CHART), "--namespace", HOME, "-f", "-")
        assert "Set it to 3, or to 4" in helm(*words, text=json.dumps(values), fails=True)
    assert ca(kubectl) == kept
    helm("uninstall", "etude", "--namespace", HOME, "--wait")
    kubectl("-n", HOME, "delete", "secret", "etude-ca")


def test_crds_that_are_not_kept_go_with_the_release(helm: Program, kubectl: Program) -> None:
    install(helm, crds={"keep": False})
    kubectl("delete", "ckpt", "--all", "--wait=false", "--ignore-not-found")
    helm("uninstall", "etude", "--namespace", HOME, "--wait")
    assert kubectl("get", "crd", "-o", "name") == ""


def test_a_release_is_refused_where_the_prometheus_operator_is_missing_and_not_where_it_is(
    helm: Program, kubectl: Program
) -> None:
    monitoring = {"podMonitors": {"enabled": True}, "prometheusRule": {"enabled": True}}
    words = ("upgrade", "--install", "etude", str(CHART), "--namespace", HOME, "--create-namespace")
    given = json.dumps({**VALUES, "monitoring": monitoring})
    missing = "install the Prometheus Operator's CRDs first"
    assert missing in helm(*words, "-f", "-", text=given, fails=True)
    for kind in ("PodMonitor", "PrometheusRule"):
        kubectl("apply", "-f", "-", text=json.dumps(loose(kind)))
        kubectl("wait", "--for=condition=Established", f"crd/{kind.lower()}s.monitoring.coreos.com")
    helm(*words, "-f", "-", text=given)
    assert "etude" in kubectl("-n", HOME, "get", "prometheusrules", "-o", "name")
    assert "etude-runs" in kubectl("-n", HOME, "get", "podmonitors", "-o", "name")


def test_every_part_can_be_switched_on_and_off_again(helm: Program, kubectl: Program) -> None:
    """No field that an API server never lets change stands in the way of a value."""
    for kind in ("PodMonitor", "PrometheusRule"):
        kubectl("apply", "-f", "-", text=json.dumps(loose(kind)))
        kubectl("wait", "--for=condition=Established", f"crd/{kind.lower()}s.monitoring.coreos.com")
    everything = yaml.safe_load(EFFECTS.read_text())["context"]
    del everything["minio"]  # its hook waits for a node: tests/harness/e2e_cluster has one
    install(helm)
    plain = objects(kubectl)
    install(helm, **everything)
    full = objects(kubectl)
    assert {"flowschemas", "networkpolicies", "configmaps"} <= {each.kind for each in full - plain}
    install(helm)
    assert objects(kubectl) == plain


class Named(NamedTuple):
    """An object of the release."""

    kind: str
    name: str


def objects(kubectl: Program) -> set[Named]:
    """Everything that carries the chart's name, of the kinds that it may make."""
    kinds = (
        *("deployments", "services", "serviceaccounts", "configmaps", "poddisruptionbudgets"),
        *("networkpolicies", "roles", "rolebindings", "podmonitors", "prometheusrules"),
        *("clusterroles", "clusterrolebindings", "flowschemas", "prioritylevelconfigurations"),
        *("validatingadmissionpolicies", "validatingadmissionpolicybindings"),
    )
    found = set()
    for kind in kinds:
        words = ("get", kind, "-l", "app.kubernetes.io/name=etude", "-o", "name")
        names = kubectl("-n", HOME, *words).splitlines()
        found |= {Named(kind, name.partition("/")[2]) for name in names}
    return found


def test_the_operators_requests_have_the_share_that_they_are_given(
    helm: Program, kubectl: Program, plane: Mapping[str, Any]
) -> None:
    install(helm, priorityAndFairness={"enabled": True})
    wanted = kubectl("get", "flowschema", f"etude.{HOME}", "-o", "jsonpath={.metadata.uid}")
    token = kubectl("-n", HOME, "create", "token", "etude-operator", "--duration=1h").strip()
    deadline = time.monotonic() + LIMIT_S
    while flow_schema(plane, token) != wanted:
        assert time.monotonic() < deadline, "the API server takes it for somebody else's"
        time.sleep(0.5)


def flow_schema(plane: Mapping[str, Any], token: str) -> str | None:
    """Which FlowSchema the API server found for a request of the kind that the operator makes."""
    trust = ssl.create_default_context(cafile=str(Path(plane["run"]) / "pki" / "ca.crt"))
    connection = http.client.HTTPSConnection(plane["node_ip"], 6443, timeout=30, context=trust)
    path, header = "/apis/etude.dev/v1alpha1/rlruns", {"Authorization": f"Bearer {token}"}
    connection.request("GET", path, headers=header)
    response = connection.getresponse()
    connection.close()
    return response.getheader("X-Kubernetes-PF-FlowSchema-UID")


def loose(kind: str) -> dict[str, Any]:
    """A kind of the Prometheus Operator by its name, without its schema."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [version],
        },
    }
