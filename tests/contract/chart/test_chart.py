"""The chart renders what it promises, and refuses values that cannot work."""

from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.support.chart.helm import (
    CHART,
    IMAGE,
    KUBERNETES,
    SERVED,
    Rendered,
    helm,
    refusal,
    rendered,
    template,
)

EVERYTHING: Mapping[str, Any] = {
    "image": "registry.example/etude@sha256:" + "0123456789abcdef" * 4,
    "requireImageDigests": True,
    "isolation": {"allowProcess": True},
    "networkPolicy": {"enabled": True},
    "priorityAndFairness": {"enabled": True},
    "monitoring": {"dashboards": {"enabled": True}},
    "telemetry": {"otlpEndpoint": "http://collector:4317"},
}
"""Values that switch on what is off."""


def rules(chart: Rendered) -> Iterator[Mapping[str, Any]]:
    for manifest in (*chart.of("Role"), *chart.of("ClusterRole")):
        yield from manifest["rules"]


@pytest.mark.smoke
def test_the_chart_passes_helms_own_lint() -> None:
    done = helm("lint", "--strict", str(CHART), "--set", f"image={IMAGE}")
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_every_manifest_is_valid_for_the_newest_kubernetes(values: Mapping[str, Any]) -> None:
    for manifest in rendered(values).manifests:
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("namespaces", [[], ["one", "two"]])
def test_the_operator_may_do_nothing_with_secrets_and_nothing_with_everything(
    namespaces: list[str],
) -> None:
    found = list(rules(rendered({"watch": {"namespaces": namespaces}})))
    assert found
    for rule in found:
        words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        assert not words & {"*", "secrets", "escalate", "bind", "impersonate"}, rule


@pytest.mark.parametrize("mode", ["SelfManaged", "Plaintext"])
def test_with_named_namespaces_the_operator_has_no_right_on_the_cluster(mode: str) -> None:
    chart = rendered({"watch": {"namespaces": ["one", "two"]}, "tls": {"mode": mode}})
    assert {"one", "two"} <= {role["metadata"]["namespace"] for role in chart.of("Role")}
    account = chart.one("ServiceAccount", "etude-operator")["metadata"]["name"]
    bound = [each["name"] for b in chart.of("ClusterRoleBinding") for each in b["subjects"]]
    assert account not in bound
    # The issuer's only right cannot be had in a namespace.
    granted = [role["rules"] for role in chart.of("ClusterRole")]
    reviews = {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"]}
    assert granted == ([[{**reviews, "verbs": ["create"]}]] if mode == "SelfManaged" else [])


def test_a_release_for_named_namespaces_can_do_without_anything_of_the_cluster() -> None:
    values = {
        "watch": {"namespaces": ["one"]},
        "crds": {"enabled": False},
        "admission": {"weakIsolation": False, "checkpoints": False},
    }
    made = rendered(values).manifests
    assert [each["kind"] for each in made if "namespace" not in each["metadata"]] == []


NUMBERS: Mapping[str, Any] = {
    "image": "12:34",
    "keda": {"enabled": True, "namespace": "1234"},
    "networkPolicy": {"enabled": True},
    "priorityAndFairness": {"enabled": True},
    "operator": {"priorityClassName": "11"},
    "serviceAccount": {"name": "42"},
    "minio": {
        "enabled": True,
        "image": "12:34",
        "bucket": "123",
        "secretName": "5",
        "storageClassName": "6",
    },
}
"""Names and free text that YAML takes for something else where they stand without quotes."""


@pytest.mark.parametrize(
    "tls",
    [
        {"mode": "SelfManaged", "trustDomain": "1.5", "selfManaged": {"caSecret": "7"}},
        {"mode": "Secret", "trustDomain": "1.5", "secretName": "8"},
        {"mode": "CertManager", "trustDomain": "1.5", "issuerRef": {"name": "9", "group": "0"}},
    ],
    ids=lambda tls: tls["mode"],
)
@pytest.mark.parametrize("watched", [[], ["007", "null"]], ids=["everything", "two namespaces"])
def test_what_looks_like_a_number_stays_a_name(tls: Mapping[str, Any], watched: list[str]) -> None:
    values = {**NUMBERS, "tls": tls, "watch": {"namespaces": watched}}
    words = (*SERVED, "--kube-version", KUBERNETES, "--namespace", "42")
    done = helm("template", "2024", str(CHART), *words, values=values)
    assert done.returncode == 0, done.stderr
    for manifest in filter(None, yaml.safe_load_all(done.stdout)):
        assert manifest["metadata"].get("namespace", "42") in {"42", *watched}
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "2024"
        if manifest["kind"] not in {"Certificate", "CustomResourceDefinition"}:
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(manifest, version, strict=True)


def test_crds_can_be_left_out_or_not_kept() -> None:
    policy = "helm.sh/resource-policy"
    kept = rendered({}).of("CustomResourceDefinition")
    assert [crd["metadata"]["annotations"][policy] for crd in kept] == ["keep"] * 5
    let_go = rendered({"crds": {"keep": False}}).of("CustomResourceDefinition")
    assert len(let_go) == 5
    for crd in let_go:
        assert policy not in crd["metadata"].get("annotations", {})
    assert rendered({"crds": {"enabled": False}}).of("CustomResourceDefinition") == []


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"image": ""}, "build one (docs/how-to/build-container-images.md)"),
        ({"image": "", "images": {"operator": "r/o:1"}}, "image: there is none for trainer"),
        ({"image": "Not An Image"}, "/image"),
        ({"imagePullPolicy": "Sometimes"}, "/imagePullPolicy"),
        ({"operator": {"replicas": 0}}, "/operator/replicas"),
        ({"operator": {"replica": 2}}, "'replica' not allowed"),
        ({"watch": {"namespaces": ["Not_A_Name"]}}, "/watch/namespaces"),
        ({"telemetry": {"otlpEndpoint": "collector:4317"}}, "/telemetry/otlpEndpoint"),
        ({"replicaCount": 2}, "'replicaCount' not allowed"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: Mapping[str, Any], names: str) -> None:
    assert names in refusal(values)


def test_each_policy_can_be_left_out_and_is_bound_where_the_operator_serves() -> None:
    values = {"watch": {"namespaces": ["lab"]}}
    chart = rendered(values)
    names = {each["metadata"]["name"] for each in chart.of("ValidatingAdmissionPolicy")}
    assert names == {
        "etude-isolation-of-envpools.etude-system",
        "etude-isolation-of-rlruns.etude-system",
        "etude-authors-of-checkpoints.etude-system",
    }
    for binding in chart.of("ValidatingAdmissionPolicyBinding"):
        assert binding["metadata"]["name"] == binding["spec"]["policyName"] in names
        (served,) = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
        assert served["values"] == ["lab"]
    none = {"admission": {"weakIsolation": False, "checkpoints": False}}
    assert rendered(none).of("ValidatingAdmissionPolicy") == []
    assert rendered(none).of("ValidatingAdmissionPolicyBinding") == []


def test_an_older_kubernetes_is_refused() -> None:
    assert "kubeVersion: >=1.32.0-0" in template({}, "--kube-version", "1.31.0").stderr
