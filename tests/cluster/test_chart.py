"""The chart installs what it promises, and refuses values that cannot work."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = str(ROOT / "helm" / "etude")
IMAGE = "localhost/etude-base:1"
Manifests = list[dict[str, Any]]


@pytest.fixture
def rendered(helm: Callable[..., str]) -> Callable[..., Manifests]:
    """What the chart makes of values."""

    def render(*values: str) -> Manifests:
        sets = [word for value in (f"image={IMAGE}", *values) for word in ("--set", value)]
        text = helm("template", "etude", CHART, "--kube-version", "1.36.0", *sets)
        return [manifest for manifest in yaml.safe_load_all(text) if manifest]

    return render


def of_kind(manifests: Manifests, kind: str) -> Manifests:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def rules(manifests: Manifests) -> Iterator[Mapping[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] in {"Role", "ClusterRole"}:
            yield from manifest["rules"]


def test_the_chart_passes_helms_own_lint(helm: Callable[..., str]) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, "--set", f"image={IMAGE}")


def test_every_manifest_is_valid_for_the_newest_kubernetes(
    rendered: Callable[..., Manifests],
) -> None:
    for manifest in rendered():
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("values", [(), ("watch.namespaces={one,two}",)])
def test_the_operator_may_do_nothing_with_secrets_and_nothing_with_everything(
    rendered: Callable[..., Manifests], values: tuple[str, ...]
) -> None:
    for rule in rules(rendered(*values)):
        words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        assert not words & {"*", "secrets", "escalate", "bind", "impersonate"}, rule


def test_named_namespaces_need_no_right_on_the_cluster(
    rendered: Callable[..., Manifests],
) -> None:
    manifests = rendered("watch.namespaces={one,two}")
    assert of_kind(manifests, "ClusterRole") == []
    roles = [role["metadata"]["namespace"] for role in of_kind(manifests, "Role")]
    assert {"one", "two"} <= set(roles)


def test_crds_can_be_left_out_or_not_kept(rendered: Callable[..., Manifests]) -> None:
    kept = of_kind(rendered(), "CustomResourceDefinition")
    policy = "helm.sh/resource-policy"
    assert [crd["metadata"]["annotations"][policy] for crd in kept] == ["keep"] * 3
    for crd in of_kind(rendered("crds.keep=false"), "CustomResourceDefinition"):
        assert policy not in crd["metadata"].get("annotations", {})
    assert of_kind(rendered("crds.enabled=false"), "CustomResourceDefinition") == []


def test_a_role_has_its_own_image_or_the_common_one(rendered: Callable[..., Manifests]) -> None:
    (deployment,) = of_kind(rendered("images.trainer=local/trainer:2"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert container["image"] == IMAGE
    assert env["ETUDE_IMAGE_TRAINER"] == "local/trainer:2"
    assert env["ETUDE_IMAGE_INFERENCE"] == IMAGE


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("image=", "image"),
        ("image=Not An Image", "image"),
        ("imagePullPolicy=Sometimes", "imagePullPolicy"),
        ("operator.replicas=0", "operator/replicas"),
        ("operator.replicas=two", "operator/replicas"),
        ("operator.replica=2", "replica"),
        ("crds.enabled=maybe", "crds/enabled"),
        ("watch.namespaces={Not_A_Name}", "watch/namespaces"),
        ("telemetry.otlpEndpoint=collector:4317", "telemetry/otlpEndpoint"),
        ("isolation.allowProcess=1", "isolation/allowProcess"),
        ("replicaCount=2", "replicaCount"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    helm: Callable[..., str], value: str, names: str
) -> None:
    words = ("--kube-version", "1.36.0", "--set", f"image={IMAGE}", "--set", value)
    assert names in helm("template", "etude", CHART, *words, fails=True)


def test_an_older_kubernetes_is_refused(helm: Callable[..., str]) -> None:
    words = ("--kube-version", "1.31.0", "--set", f"image={IMAGE}")
    assert "kubeVersion: >=1.32.0-0" in helm("template", "etude", CHART, *words, fails=True)
