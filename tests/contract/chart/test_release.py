"""What comes with a release: its test, its first words, its profiles, its page on Artifact Hub."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.chart.helm import CHART, NAMESPACE, refusal, rendered, template

from etude.common.api.lint.linter import lint_text
from etude.common.api.schema import crd
from etude.operator.commands import helm_test
from etude.operator.integrations.apis import INTEGRATIONS

NAMES = [each.name for each in INTEGRATIONS]
DIGEST = "registry.example/etude@sha256:" + "0123456789abcdef" * 4


def chart() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return read


def notes(folder: Path, **values: Any) -> str:
    """What Helm prints after an installation; alone, it prints nothing without a cluster."""
    copied = folder / "etude"
    if not copied.exists():
        shutil.copytree(CHART, copied)
        (copied / "templates" / "NOTES.txt").rename(copied / "NOTES.txt")
        shown = 'kind: Notes\ntext: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n'
        (copied / "templates" / "notes.yaml").write_text(shown)
    done = template(values, "--show-only", "templates/notes.yaml", chart=copied)
    assert done.returncode == 0, done.stderr
    text: str = yaml.safe_load(done.stdout)["text"]
    return text


def test_helm_test_runs_our_program_with_the_operators_settings_and_rights() -> None:
    release = rendered({"operator": {"nodeSelector": {"pool": "system"}}})
    pod = release.one("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    spec, operator = pod["spec"], release.pod
    (container,), (ours,) = spec["containers"], operator["containers"]
    # It talks to the API server alone, and has no certificate.
    assert container["env"] == [each for each in ours["env"] if each["name"] != "ETUDE_TLS"]
    assert container["image"] == ours["image"]
    for name in ("serviceAccountName", "securityContext", "nodeSelector"):
        assert spec[name] == operator[name]
    assert container["securityContext"] == ours["securityContext"]
    *program, host, port = container["command"]
    assert program == ["python", "-m", helm_test.__name__]
    service = release.one("Service", host)["spec"]
    assert service["selector"] == release.one("Deployment")["spec"]["selector"]["matchLabels"]
    assert [str(each["port"]) for each in service["ports"]] == [port]


def test_the_fence_lets_the_test_in_whoever_reads_metrics() -> None:
    peer = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    release = rendered({"networkPolicy": {"enabled": True, "metricsFrom": [peer]}})
    (rule,) = release.one("NetworkPolicy", "etude-operator")["spec"]["ingress"]
    labels = release.one("Pod")["metadata"]["labels"]
    assert any(
        each["podSelector"]["matchLabels"].items() <= labels.items() for each in rule["from"]
    )
    selected = release.one("Deployment")["spec"]["selector"]["matchLabels"]
    assert not selected.items() <= labels.items(), "the test is no replica"


def test_the_test_is_fenced_in_as_well() -> None:
    fence = {"enabled": True, "apiServer": {"ports": [16443], "cidrs": ["10.1.2.3/32"]}}
    release = rendered({"networkPolicy": fence})
    spec = release.one("NetworkPolicy", "etude-test")["spec"]
    labels = release.one("Pod")["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    api, dns, operator = spec["egress"]
    assert api["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    assert {port["port"] for rule in (api, dns) for port in rule["ports"]} == {16443, 53}
    assert operator["to"] == [{"podSelector": release.one("Deployment")["spec"]["selector"]}]


@pytest.mark.parametrize("namespaces", [[], ["team-a", "team-b"]])
def test_the_notes_lead_to_a_first_run_that_is_valid(namespaces: list[str], tmp_path: Path) -> None:
    text = notes(tmp_path, watch={"namespaces": namespaces})
    lab = namespaces[0] if namespaces else "lab"
    assert f"helm test etude --namespace {NAMESPACE}" in text
    # One that is named holds the operator's Role: it is there, or there is no release.
    assert ("kubectl create namespace" in text) == (not namespaces)
    (manifest,) = re.findall(rf"kubectl -n {lab} apply -f - <<'EOF'\n(.*?)\n  EOF", text, re.DOTALL)
    lines = [line.removeprefix("  ").replace("BUCKET", "bucket") for line in manifest.splitlines()]
    assert lint_text("\n".join(lines), name="notes") == []


def test_with_a_store_of_its_own_the_notes_fill_in_its_address_and_keys(tmp_path: Path) -> None:
    text = notes(tmp_path, minio={"enabled": True, "image": "localhost/minio:1", "bucket": "runs"})
    address = f"http://etude-minio.{NAMESPACE}.svc:9000"
    assert f"storage: {{uri: s3://runs/runs/first, endpoint: {address}, region: us-east-1" in text
    assert "model: {uri: s3://runs/model}" in text
    assert f"kubectl -n {NAMESPACE} get secret etude-minio" in text
    assert "{{range $k, $v := .data}}--from-literal={{$k}}={{base64decode $v}} {{end}}" in text
    assert "for evaluation only" in text
    assert "BUCKET" not in text


def test_the_notes_say_what_an_installation_leaves_open(tmp_path: Path) -> None:
    careful = notes(tmp_path)
    assert "isolation.minimum Process are refused here" in careful
    assert "weak-isolation" not in careful
    assert "operator.replicas=2" not in careful
    trusting = notes(tmp_path, isolation={"allowProcess": True}, operator={"replicas": 1})
    assert "kubectl label namespace lab etude.dev/weak-isolation=allow" in trusting
    assert "If they end with DriverUnavailable" in trusting
    assert "operator.replicas=2 takes" in trusting


@pytest.mark.parametrize(
    "profile", sorted((CHART / "profiles").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_profile_renders_and_changes_only_what_it_names(profile: Path) -> None:
    own = yaml.safe_load(profile.read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert same(own, defaults) == [], "what is the default already says nothing"
    done = rendered({"image": DIGEST, **own})
    assert done.one("Deployment")["spec"]["replicas"] == own["operator"].get("replicas", 2)


def same(own: Any, defaults: Any, at: str = "") -> list[str]:
    """Values that a profile gives and that are the defaults."""
    if isinstance(own, dict) and isinstance(defaults, dict):
        return [path for key in own for path in same(own[key], defaults.get(key), f"{at}.{key}")]
    return [at] if own == defaults else []


def test_the_profile_for_gpus_asks_for_digests_and_fences_the_operator_in() -> None:
    own = yaml.safe_load((CHART / "profiles" / "gpu.yaml").read_text())
    assert "image: localhost/etude-base:1 names no digest" in refusal(own)
    release = rendered({"image": DIGEST, **own})
    fences = {each["metadata"]["name"] for each in release.of("NetworkPolicy")}
    assert fences == {"etude-operator", "etude-test"}
    assert len(release.of("FlowSchema")) == 1
    assert "nvidia.com/gpu.present" in str(release.pod["affinity"])


def test_the_operator_can_have_a_share_of_the_api_server() -> None:
    release = rendered({"priorityAndFairness": {"enabled": True, "shares": 7}})
    level = release.one("PriorityLevelConfiguration")
    schema = release.one("FlowSchema")["spec"]
    assert level["spec"]["limited"]["nominalConcurrencyShares"] == 7
    assert schema["priorityLevelConfiguration"]["name"] == level["metadata"]["name"]
    (subject,) = schema["rules"][0]["subjects"]
    account = release.pod["serviceAccountName"]
    assert subject["serviceAccount"] == {"name": account, "namespace": NAMESPACE}
    assert rendered({}).of("FlowSchema") == rendered({}).of("PriorityLevelConfiguration") == []


def test_releases_of_one_name_in_two_namespaces_share_nothing_of_the_cluster() -> None:
    values = {
        "tls": {"mode": "SelfManaged"},
        "image": DIGEST,
        "requireImageDigests": True,
        "priorityAndFairness": {"enabled": True},
        "integrations": {name: {"enabled": True} for name in NAMES},
    }
    for watched in ([], ["lab"]):
        given = {**values, "watch": {"namespaces": watched}}
        first, second = (of_the_cluster(given, home) for home in ("team-a", "team-b"))
        assert first
        assert not first & second


def of_the_cluster(values: dict[str, Any], home: str) -> set[tuple[str, str]]:
    """Kinds and names of what a release in a namespace makes outside of all namespaces.

    All releases of a cluster have the same CRDs.
    """
    made = rendered(values, "--namespace", home).manifests
    return {
        (each["kind"], each["metadata"]["name"])
        for each in made
        if "namespace" not in each["metadata"] and each["kind"] != "CustomResourceDefinition"
    }


def test_artifact_hub_is_told_of_every_kind_with_an_example_that_is_valid() -> None:
    annotations = chart()["annotations"]
    listed = yaml.safe_load(annotations["artifacthub.io/crds"])
    known = {
        (kind.name, crd.definition(kind)["metadata"]["name"], version["name"])
        for kind in crd.KINDS
        for version in crd.definition(kind)["spec"]["versions"]
    }
    assert {(each["kind"], each["name"], each["version"]) for each in listed} == known
    examples = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    assert {each["kind"] for each in examples} == {kind.name for kind in crd.KINDS}
    for example in examples:
        assert lint_text(json.dumps(example), name=example["kind"]) == []


def test_the_charts_version_is_that_of_the_program() -> None:
    pyproject = (CHART.parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{chart()["appVersion"]}"\n' in pyproject
