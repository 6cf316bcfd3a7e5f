"""How the operator's own pods are made, placed and fenced in."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.chart.helm import IMAGE, Rendered, refusal, rendered

from etude.operator.builders.addresses import PORTS

DIGEST = "registry.example/etude@sha256:" + "0123456789abcdef" * 4


def operator(**values: Any) -> Rendered:
    return rendered({"operator": values})


def fenced(policy: Mapping[str, Any] | None = None, **values: Any) -> Mapping[str, Any]:
    """The spec of the operator's NetworkPolicy."""
    chart = rendered({**values, "networkPolicy": {"enabled": True, **(policy or {})}})
    spec: Mapping[str, Any] = chart.one("NetworkPolicy", "etude-operator")["spec"]
    return spec


def environment(chart: Rendered) -> dict[str, Any]:
    return {each["name"]: each for each in chart.pod["containers"][0]["env"]}


def test_two_replicas_share_no_node_where_there_is_another() -> None:
    chart = operator()
    deployment = chart.one("Deployment")["spec"]
    assert deployment["replicas"] == 2
    spread = {each["topologyKey"]: each for each in chart.pod["topologySpreadConstraints"]}
    assert spread.keys() == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    for constraint in spread.values():
        assert constraint["labelSelector"] == deployment["selector"]
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", "one machine is enough"


def test_a_constraint_of_the_users_is_about_the_operators_pods_unless_it_says_otherwise() -> None:
    constraint = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    other = {**constraint, "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "other"}}}
    own, others = operator(topologySpreadConstraints=[constraint, other]).pod[
        "topologySpreadConstraints"
    ]
    assert own["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert (own["maxSkew"], own["whenUnsatisfiable"]) == (2, "DoNotSchedule")
    assert others["labelSelector"]["matchLabels"]["app.kubernetes.io/name"] == "other"


def test_a_drain_evicts_the_replicas_one_after_the_other() -> None:
    chart = operator()
    budget = chart.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == chart.one("Deployment")["spec"]["selector"]
    half = operator(podDisruptionBudget={"maxUnavailable": "50%"})
    assert half.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    assert operator(podDisruptionBudget={"enabled": False}).of("PodDisruptionBudget") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priorityClassName", "system-cluster-critical"),
        ("nodeSelector", {"pool": "system"}),
        ("tolerations", [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}]),
        ("affinity", {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}),
    ],
)
def test_the_pods_run_where_they_are_told_to(name: str, value: object) -> None:
    everything = {
        "minio": {"enabled": True, "image": "localhost/minio:1", "secretName": "keys"},
        "tls": {"mode": "SelfManaged"},
    }
    asked = {
        spec.get(name) == value
        for spec in pods(rendered({"operator": {name: value}, **everything}))
    }
    assert asked == {True}
    assert all(name not in spec for spec in pods(rendered(everything)))


def pods(chart: Rendered) -> list[dict[str, Any]]:
    """The spec of every pod that the chart makes, or has somebody make."""
    makers = [each for kind in ("Deployment", "StatefulSet", "Job") for each in chart.of(kind)]
    found = [each["spec"]["template"]["spec"] for each in makers]
    found += [each["spec"] for each in chart.of("Pod")]
    assert len(found) == 5
    return found


def test_the_pods_carry_what_they_are_given() -> None:
    chart = operator(
        podAnnotations={"example.com/team": "rl"},
        podLabels={"cost": "training", "app.kubernetes.io/component": "other"},
        extraEnv=[{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        extraVolumes=[{"name": "ca", "configMap": {"name": "ca"}}],
        extraVolumeMounts=[{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        resources={"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    )
    metadata = chart.one("Deployment")["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {"example.com/team": "rl"}
    assert metadata["labels"]["cost"] == "training"
    assert metadata["labels"]["app.kubernetes.io/component"] == "operator", "selected by it"
    (container,) = chart.pod["containers"]
    assert environment(chart)["HTTPS_PROXY"]["value"] == "http://proxy:3128"
    assert {"name": "ca", "configMap": {"name": "ca"}} in chart.pod["volumes"]
    assert {"name": "ca", "mountPath": "/etc/ca", "readOnly": True} in container["volumeMounts"]
    assert container["resources"]["requests"]["cpu"] == "1"
    assert container["resources"]["limits"]["memory"] == "1Gi"


def test_what_the_chart_sets_cannot_be_given_twice() -> None:
    own = [{"name": "ETUDE_LEASE", "value": "mine"}]
    assert "operator.extraEnv: ETUDE_LEASE is set by the chart" in refusal(
        {"operator": {"extraEnv": own}}
    )
    volume = [{"name": "tmp", "emptyDir": {}}]
    assert "operator.extraVolumes: the chart has a volume tmp" in refusal(
        {"operator": {"extraVolumes": volume}}
    )


def test_a_role_has_its_own_image_or_the_common_one() -> None:
    chart = rendered({"images": {"trainer": "local/trainer:2"}})
    found = environment(chart)
    assert chart.pod["containers"][0]["image"] == IMAGE
    assert found["ETUDE_IMAGE_TRAINER"]["value"] == "local/trainer:2"
    assert found["ETUDE_IMAGE_INFERENCE"]["value"] == IMAGE


def test_values_reach_the_operator_and_its_account() -> None:
    chart = rendered(
        {
            "watch": {"namespaces": ["one", "two"]},
            "isolation": {
                "allowProcess": True,
                "seccompProfile": "etude/node.json",
                "kvmResource": "devices.kubevirt.io/kvm",
            },
            "telemetry": {"otlpEndpoint": "http://collector:4317"},
            "serviceAccount": {"name": "ours", "annotations": {"example.com/role": "none"}},
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "registry"}],
        }
    )
    found = {name: each.get("value") for name, each in environment(chart).items()}
    assert found["ETUDE_WATCH_NAMESPACES"] == "one,two"
    assert found["ETUDE_ALLOW_WEAK_ISOLATION"] == "1"
    assert found["ETUDE_NODE_SECCOMP_PROFILE"] == "etude/node.json"
    assert found["ETUDE_KVM_RESOURCE"] == "devices.kubevirt.io/kvm"
    assert found["ETUDE_OTLP_ENDPOINT"] == "http://collector:4317"
    assert chart.pod["serviceAccountName"] == "ours"
    account = chart.one("ServiceAccount")["metadata"]
    assert (account["name"], account["annotations"]) == ("ours", {"example.com/role": "none"})
    assert chart.pod["containers"][0]["imagePullPolicy"] == "Always"
    assert chart.pod["imagePullSecrets"] == [{"name": "registry"}]
    for binding in (*chart.of("RoleBinding"), *chart.of("ClusterRoleBinding")):
        assert [subject["name"] for subject in binding["subjects"]] == ["ours"]


def test_where_digests_are_required_a_tag_is_refused_by_the_value_that_names_it() -> None:
    required = {"requireImageDigests": True, "image": DIGEST}
    assert rendered(required).pod["containers"][0]["image"] == DIGEST
    assert f"image: {IMAGE} names no digest" in refusal({**required, "image": IMAGE})
    tagged = {**required, "images": {"trainer": "local/trainer:2"}}
    assert "images.trainer: local/trainer:2 names no digest" in refusal(tagged)


def test_the_fence_lets_out_what_the_operator_dials_and_nothing_else() -> None:
    spec = fenced(watch={"namespaces": ["lab"]}, telemetry={"otlpEndpoint": "http://otel.obs:4317"})
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    ports = {port["port"] for rule in spec["egress"] for port in rule["ports"]}
    roles = {"trainer": PORTS["trainer"]["grpc"], "broker": PORTS["broker"]["grpc"]}
    assert ports == {443, 6443, 53, 4317, *roles.values()}
    served = [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["lab"]}]
    for role, port in roles.items():
        (rule,) = (each for each in spec["egress"] if each["ports"][0]["port"] == port)
        (peer,) = rule["to"]
        assert peer["podSelector"]["matchLabels"]["etude.dev/role"] == role
        assert peer["namespaceSelector"] == {"matchExpressions": served}


def test_the_fence_lets_in_those_who_read_metrics() -> None:
    assert fenced()["ingress"] == [{"ports": [{"port": "probe", "protocol": "TCP"}]}]
    monitoring = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    (rule,) = fenced(policy={"metricsFrom": [monitoring]})["ingress"]
    assert rule["ports"] == [{"port": "probe", "protocol": "TCP"}]
    assert rule["from"][0] == monitoring
    assert len(rule["from"]) == 2, "and helm test, see test_release"


def test_the_fence_can_be_moved() -> None:
    extra = {"ports": [{"port": 8200, "protocol": "TCP"}]}
    api = {"ports": [16443], "cidrs": ["10.1.2.3/32"]}
    egress = fenced(policy={"apiServer": api, "extraEgress": [extra]})["egress"]
    assert egress[0] == {
        "ports": [{"port": 16443, "protocol": "TCP"}],
        "to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}],
    }
    assert egress[-1] == extra
    assert {443, 6443, 4317}.isdisjoint(port["port"] for rule in egress for port in rule["ports"])
    assert fenced(telemetry={"otlpEndpoint": "https://otel.example"})["egress"][-1]["ports"] == [
        {"port": 443, "protocol": "TCP"}
    ]
    assert rendered({}).of("NetworkPolicy") == []
