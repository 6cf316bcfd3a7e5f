"""What the chart makes of each way to certificates."""

import base64
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from cryptography import x509
from tests.support.chart.helm import CHART, IMAGE, SERVED, Rendered, refusal, rendered, template

from etude.operator.builders.certificates import renewal_sidecar

SELF_MANAGED = {"mode": "SelfManaged"}
OPERATOR = "spiffe://etude.dev/ns/etude-system/role/operator"


Render = Callable[..., "subprocess.CompletedProcess[str]"]


def chart(**tls: Any) -> Rendered:
    return rendered({"tls": tls}, *SERVED)


def pod_of(made: Rendered, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = made.one("Deployment", name)["spec"]["template"]["spec"]
    return spec


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def test_the_operators_sidecar_is_the_one_that_it_gives_to_runs() -> None:
    (own,) = pod_of(chart(**SELF_MANAGED), "etude-operator")["initContainers"]
    given = renewal_sidecar("etude-issuer.etude-system.svc:7060", OPERATOR)
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


def mounted(made: Rendered, name: str) -> set[str]:
    """Keys of the Secret of the CA that a Deployment's pods see."""
    (ca,) = [v["secret"] for v in pod_of(made, name)["volumes"] if "secret" in v]
    assert all(item["path"] == item["key"] for item in ca["items"])
    return {item["key"] for item in ca["items"]}


@pytest.mark.parametrize("generation", [1, 2, 3])
@pytest.mark.parametrize("secret", ["", "ours"])
def test_the_issuer_signs_with_those_that_runs_are_told_to_believe(
    secret: str, generation: int
) -> None:
    """A Secret of the users' may hold others, which are believed no more or not yet."""
    own = {"caSecret": secret, "generation": generation}
    made = chart(mode="SelfManaged", selfManaged=own)
    believed = mounted(made, "etude-operator")
    numbers = {max(1, generation - 1), generation}
    assert believed == {f"ca-{number}.crt" for number in numbers}
    keys = {name.replace(".crt", ".key") for name in believed}
    assert mounted(made, "etude-issuer") == believed | keys


def test_the_issuer_may_ask_whose_a_token_is_and_nothing_else() -> None:
    role = chart(**SELF_MANAGED).one("ClusterRole", "etude-issuer.etude-system")
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


class Upgrade(NamedTuple):
    """A generation for a cluster whose Secret holds some CAs."""

    held: tuple[int, ...]
    generation: int


@pytest.fixture
def upgraded(tmp_path: Path) -> Render:
    """Render the chart as if its lookup had found a Secret; without a cluster it finds none."""

    def render(upgrade: Upgrade) -> "subprocess.CompletedProcess[str]":
        chart = tmp_path / "etude"
        shutil.copytree(CHART, chart)
        file = chart / "templates" / "tls" / "_tls.tpl"
        looked_up = '(lookup "v1" "Secret" .Release.Namespace (include "etude.caSecret" .))'
        text = file.read_text()
        assert text.count(looked_up) == 1
        file.write_text(text.replace(looked_up, '(.Files.Get "found.yaml" | fromYaml)'))
        (chart / "found.yaml").write_text(yaml.safe_dump({"data": held_data(upgrade.held)}))
        given = {"mode": "SelfManaged", "selfManaged": {"generation": upgrade.generation}}
        return template({"tls": given}, "--show-only", "templates/tls/ca.yaml", chart=chart)

    return render


def held_data(numbers: Sequence[int]) -> dict[str, str]:
    """What a Secret with these CAs has as its data; the values only have to differ."""
    names = [f"ca-{number}.{end}" for number in numbers for end in ("crt", "key")]
    return {name: base64.b64encode(name.encode()).decode() for name in names}


@pytest.mark.parametrize(
    "upgrade",
    [
        Upgrade((1,), 1),
        Upgrade((1,), 2),
        Upgrade((1, 2), 2),
        Upgrade((1, 2), 3),
        Upgrade((9, 10), 10),
        Upgrade((9, 10), 11),
    ],
    ids=str,
)
def test_the_ca_that_signs_stays_as_it_was(upgrade: Upgrade, upgraded: Render) -> None:
    done = upgraded(upgrade)
    assert done.returncode == 0, done.stderr
    data = yaml.safe_load(done.stdout)["data"]
    assert held_data(upgrade.held[-1:]).items() <= data.items()
    numbers = {max(1, upgrade.generation - 1), upgrade.generation}
    assert data.keys() == held_data(sorted(numbers)).keys()


@pytest.mark.parametrize(
    "upgrade",
    [
        Upgrade((1,), 3),
        Upgrade((1, 2), 1),
        Upgrade((1, 2), 4),
        Upgrade((2, 3), 1),
        Upgrade((3, 4), 1),
        Upgrade((3, 4), 3),
        Upgrade((9, 10), 9),
        Upgrade((1, 2), 20),
    ],
    ids=str,
)
def test_a_generation_that_would_lose_a_ca_is_refused_with_those_that_do_not(
    upgrade: Upgrade, upgraded: Render
) -> None:
    done = upgraded(upgrade)
    last = upgrade.held[-1]
    assert done.returncode != 0
    assert (
        f"tls.selfManaged.generation: {upgrade.generation} would throw away a CA of Secret"
        f" etude-system/etude-ca that runs believe: the last of it is ca-{last}."
        f" Set it to {last}, or to {last + 1}"
    ) in done.stderr


def test_a_secret_without_a_ca_is_refused(upgraded: Render) -> None:
    """Whatever else it holds would be lost."""
    done = upgraded(Upgrade((0,), 1))
    assert "Secret etude-system/etude-ca holds no CA (ca-1.crt and ca-1.key)" in done.stderr


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
    rules = made.one("ClusterRole", "etude-operator.etude-system")["rules"]
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
