"""The object store for evaluation: off unless it is wanted, and as restricted as the rest."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.support.chart.helm import (
    CHART,
    KUBERNETES,
    NAMESPACE,
    Manifest,
    Rendered,
    helm,
    refusal,
    rendered,
)

IMAGE = "localhost/minio:1"
NAME = "etude-minio"


def minio(*, policy: bool = False, **values: Any) -> Rendered:
    given = {"enabled": True, "image": IMAGE, **values}
    return rendered({"minio": given, "networkPolicy": {"enabled": policy}})


def own(release: Rendered) -> list[Manifest]:
    return [each for each in release.manifests if each["metadata"]["name"].startswith(NAME)]


def test_there_is_no_object_store_unless_it_is_asked_for() -> None:
    assert own(rendered({})) == []


def test_it_is_refused_without_an_image_and_without_a_digest_where_digests_are_required() -> None:
    assert "minio.image: minio.enabled needs an image" in refusal({"minio": {"enabled": True}})
    values = {
        "image": "registry.example/etude@sha256:" + "0123456789abcdef" * 4,
        "requireImageDigests": True,
        "minio": {"enabled": True, "image": IMAGE},
    }
    assert f"minio.image: {IMAGE} names no digest" in refusal(values)


def test_every_manifest_is_valid_for_the_newest_kubernetes() -> None:
    found = own(minio(policy=True))
    kinds = {each["kind"] for each in found}
    assert kinds == {"StatefulSet", "Service", "Secret", "Job", "NetworkPolicy"}
    for manifest in found:
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_its_pods_are_of_the_restricted_standard_and_have_no_token(kind: str) -> None:
    pod = minio().one(kind)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("release", ["a" * 52, "etude-" + "a" * 46, "a" * 45 + "-" + "b" * 6])
def test_a_long_release_name_leaves_room_for_what_kubernetes_adds(release: str) -> None:
    values = {"image": IMAGE, "minio": {"enabled": True, "image": IMAGE}}
    done = helm("template", release, str(CHART), "--kube-version", KUBERNETES, values=values)
    assert done.returncode == 0, done.stderr
    made = [each for each in yaml.safe_load_all(done.stdout) if each]
    names = {(each["kind"], each["metadata"]["name"]) for each in made}
    for kind, name in names:
        # A label of a StatefulSet's pods is its name with a hyphen and a hash of ten characters.
        limit = 63 - len("-0123456789") if kind == "StatefulSet" else 63
        of_a_pod = kind in {"StatefulSet", "Job", "Service", "Deployment", "Pod"}
        assert not of_a_pod or len(name) <= limit, name
    (server,) = (name for kind, name in names if kind == "StatefulSet")
    assert ("Service", server) in names
    assert server.endswith("-minio")
    assert "--" not in server


def test_data_and_keys_outlive_the_release() -> None:
    release = minio()
    retention = release.one("StatefulSet")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert set(retention.values()) == {"Retain"}
    secret = release.one("Secret", NAME)
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert secret["data"].keys() == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def test_keys_of_the_users_own_are_taken_and_none_are_made() -> None:
    release = minio(secretName="keys")
    assert release.of("Secret") == []
    for kind in ("StatefulSet", "Job"):
        (container,) = release.one(kind)["spec"]["template"]["spec"]["containers"]
        from_ = [each["valueFrom"] for each in container["env"] if "valueFrom" in each]
        assert {each["secretKeyRef"]["name"] for each in from_} == {"keys"}


def test_the_bucket_is_made_at_the_address_of_the_service_once_there_is_a_server() -> None:
    release = minio(bucket="runs")
    job = release.one("Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *program, address, option, endpoint = container["command"]
    assert (program, address) == (["etude", "storage", "init"], "s3://runs")
    assert (option, endpoint) == ("--endpoint", f"http://{NAME}.{NAMESPACE}.svc:9000")
    service = release.one("Service", NAME)["spec"]
    assert [each["port"] for each in service["ports"]] == [9000]
    server = release.one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= server.items()
    maker = job["spec"]["template"]["metadata"]["labels"]
    assert not service["selector"].items() <= maker.items(), "what makes the bucket is no server"


def test_the_operator_is_selected_by_nothing_that_selects_the_store() -> None:
    release = minio()
    operator = release.one("Deployment")["spec"]
    store = release.one("StatefulSet")["spec"]
    for mine, others in ((operator, store), (store, operator)):
        selected = mine["selector"]["matchLabels"]
        assert not selected.items() <= others["template"]["metadata"]["labels"].items()


def test_runs_and_what_makes_the_bucket_reach_it_and_it_reaches_nobody() -> None:
    release = minio(policy=True)
    spec = release.one("NetworkPolicy", NAME)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in spec
    (rule,) = spec["ingress"]
    runs, maker = rule["from"]
    assert runs["podSelector"]["matchLabels"] == {"app.kubernetes.io/managed-by": "etude"}
    assert runs["namespaceSelector"] == {}
    labels = release.one("Job")["spec"]["template"]["metadata"]["labels"]
    assert maker["podSelector"]["matchLabels"].items() <= labels.items()
