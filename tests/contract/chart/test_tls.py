"""What the chart makes of each way to certificates."""

import base64
from typing import Any

import pytest
import yaml
from cryptography import x509
from tests.support.helm import IMAGE, SERVED, Rendered, refusal, rendered, template

from etude.operator.desired.certificates import keeper

SELF_MANAGED = {"mode": "SelfManaged"}
OPERATOR = "spiffe://etude.dev/ns/etude-system/role/operator"


def chart(**tls: Any) -> Rendered:
    return rendered({"tls": tls}, *SERVED)


def pod_of(made: Rendered, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = made.one("Deployment", name)["spec"]["template"]["spec"]
    return spec


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def test_the_operators_sidecar_is_the_one_that_it_gives_to_runs() -> None:
    (own,) = pod_of(chart(**SELF_MANAGED), "etude-operator")["initContainers"]
    given = keeper("etude-issuer.etude-system.svc:7060", OPERATOR)
    assert own["image"] == IMAGE
    assert environment(own) == environment(given)
    same = set(given) - {"env", "volumeMounts"}
    assert {key: own[key] for key in same} == {key: given[key] for key in same}
    places = [{each["mountPath"] for each in one["volumeMounts"]} for one in (own, given)]
    assert places[0] == places[1]


def test_only_the_issuer_holds_the_keys_of_the_ca() -> None:
    made = chart(**SELF_MANAGED)
    (ca,) = [v for v in pod_of(made, "etude-issuer")["volumes"] if "secret" in v]
    assert ca["secret"]["secretName"] == "etude-ca"
    (trust,) = [v for v in pod_of(made, "etude-operator")["volumes"] if "secret" in v]
    keys = {item["key"] for item in trust["secret"]["items"]}
    assert keys == {"ca-1.crt"}


def test_the_issuer_may_ask_whose_a_token_is_and_nothing_else() -> None:
    role = chart(**SELF_MANAGED).one("ClusterRole", "etude-issuer")
    assert role["rules"] == [
        {
            "apiGroups": ["authentication.k8s.io"],
            "resources": ["tokenreviews"],
            "verbs": ["create"],
        }
    ]


@pytest.mark.parametrize("mode", ["SelfManaged", "CertManager", "Secret", "Plaintext"])
def test_nothing_of_ours_has_a_right_on_secrets(mode: str) -> None:
    made = chart(mode=mode, secretName="wire", issuerRef={"name": "ca"})
    for kind in ("ClusterRole", "Role"):
        for role in made.of(kind):
            for rule in role["rules"]:
                assert "secrets" not in rule["resources"]
                assert not {"*"} & {*rule["resources"], *rule["verbs"], *rule["apiGroups"]}


@pytest.mark.parametrize("days", [30, 400])
def test_a_ca_lives_as_long_as_is_said(days: int) -> None:
    secret = chart(mode="SelfManaged", selfManaged={"caDays": days}).one("Secret")
    made = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["ca-1.crt"]))
    assert (made.not_valid_after_utc - made.not_valid_before_utc).days == days
    assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_further_generation_keeps_its_predecessor() -> None:
    made = chart(mode="SelfManaged", selfManaged={"generation": 3})
    names = {"ca-2.crt", "ca-2.key", "ca-3.crt", "ca-3.key"}
    assert made.one("Secret")["data"].keys() == names
    notes = made.one("Deployment", "etude-operator")["spec"]["template"]["metadata"]["annotations"]
    assert notes["etude.dev/ca-generation"] == "3", "it reads whom runs shall believe at its start"


def test_a_ca_of_the_users_is_taken_as_it_is() -> None:
    made = chart(mode="SelfManaged", selfManaged={"caSecret": "ours"})
    assert made.of("Secret") == []
    (ca,) = [v for v in pod_of(made, "etude-issuer")["volumes"] if "secret" in v]
    assert ca["secret"]["secretName"] == "ours"


def test_the_ca_outlives_the_release_as_runs_do() -> None:
    secret = chart(**SELF_MANAGED).one("Secret")
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_who_says_nothing_has_certificates() -> None:
    done = template({"tls": {}})
    assert done.returncode == 0, done.stderr
    made = Rendered([each for each in yaml.safe_load_all(done.stdout) if each])
    (container,) = pod_of(made, "etude-operator")["containers"]
    assert environment(container)["ETUDE_TLS"] == "/etc/etude-tls"
    assert made.one("Deployment", "etude-issuer")["spec"]["replicas"] == 2


def test_keda_finds_the_operator_by_the_names_of_its_certificate() -> None:
    values = {
        "tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}},
        "keda": {"enabled": True},
    }
    made = rendered(values, *SERVED)
    name = made.one("Service", "etude-operator")["metadata"]["name"]
    assert f"{name}.etude-system" in made.one("Certificate")["spec"]["dnsNames"]
    issuer = pod_of(chart(**SELF_MANAGED), "etude-issuer")["containers"][0]
    assert environment(issuer)["ETUDE_OPERATOR_SERVICE"] == name


def test_the_issuer_is_watched_where_metrics_are_read() -> None:
    monitors = {"monitoring": {"podMonitors": {"enabled": True}}}
    spec = rendered({"tls": SELF_MANAGED, **monitors}, *SERVED).one("PodMonitor", "etude-issuer")[
        "spec"
    ]
    pod = chart(**SELF_MANAGED).one("Deployment", "etude-issuer")["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert spec["podMetricsEndpoints"][0]["port"] in {each["name"] for each in container["ports"]}
    names = {each["metadata"]["name"] for each in rendered(monitors, *SERVED).of("PodMonitor")}
    assert names == {"etude-operator", "etude-runs"}


def test_cert_manager_is_asked_for_the_operators_certificate() -> None:
    made = chart(mode="CertManager", issuerRef={"name": "ca", "kind": "Issuer"})
    spec = made.one("Certificate")["spec"]
    assert spec["uris"] == [OPERATOR]
    assert spec["issuerRef"] == {"name": "ca", "kind": "Issuer", "group": "cert-manager.io"}
    (own,) = [v for v in pod_of(made, "etude-operator")["volumes"] if "secret" in v]
    assert own["secret"]["secretName"] == spec["secretName"]
    rules = made.one("ClusterRole", "etude-operator")["rules"]
    (rule,) = [each for each in rules if "certificates" in each["resources"]]
    assert set(rule["verbs"]) == {"get", "list", "watch", "create", "patch"}


def test_what_cannot_work_is_refused_with_a_way_out() -> None:
    assert "install cert-manager first" in refusal(
        {"tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}}}
    )
    assert "tls.issuerRef.name" in refusal({"tls": {"mode": "CertManager"}}, *SERVED)
    assert "tls.secretName" in refusal({"tls": {"mode": "Secret"}})


def test_an_operator_in_the_clear_was_told_so() -> None:
    (container,) = chart(mode="Plaintext").pod["containers"]
    assert environment(container)["ETUDE_TLS"] == "Plaintext"
