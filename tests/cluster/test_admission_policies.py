"""What the chart's admission policies let through, on a real API server."""

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.kube import testbeds
from tests.support.kube.testbeds import Program

from etude.cli.kubectl.verbs.checkpoint import checkpoint_request

ROOT = Path(__file__).parents[2]
GOOD = yaml.safe_load((Path(__file__).parent / "bad_manifests.yaml").read_text())["good"]
DIGEST = "registry.example/etude@sha256:" + "0123456789abcdef" * 4
OPERATOR = "system:serviceaccount:etude-system:etude-operator"
BASE: dict[str, Any] = {
    "image": DIGEST,
    "crds": {"enabled": False},
    "operator": {"nodeSelector": {"no-node": "has-this"}},
}
PROCESS = {"minimum": "Process", "driver": "Process"}

Install = Callable[..., None]


@pytest.fixture(scope="module")
def kubectl(plane: testbeds.State) -> Program:
    return testbeds.program(plane, "kubectl")


@pytest.fixture(scope="module")
def install(plane: testbeds.State, kubectl: Program) -> Install:
    """Install the chart, or give the release other values; its policies hold a moment later."""
    helm = testbeds.program(plane, "helm")
    crds = ("-f", str(ROOT / "helm" / "etude" / "files" / "crds"))
    kubectl("apply", "--server-side", *crds)
    kubectl("wait", "--for=condition=Established", *crds, "--timeout=60s")

    def upgrade(**values: Any) -> None:
        release = ("etude", str(ROOT / "helm" / "etude"), "--namespace", "etude-system")
        given = json.dumps({**BASE, **values})
        helm("upgrade", "--install", *release, "--create-namespace", "-f", "-", text=given)

    return upgrade


@pytest.fixture
def namespace(kubectl: Program) -> str:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    return name


def pool(name: str = "repos", **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(GOOD["EnvPool"])
    made["metadata"]["name"] = name
    made["spec"] |= spec
    return made


def run(**roles: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(GOOD["RLRun"])
    made["spec"]["roles"] |= roles
    return made


def verdict(kubectl: Program, namespace: str, body: dict[str, Any], *words: str) -> str:
    """Why the API server does not take an object; empty if it does."""
    try:
        kubectl("-n", namespace, "create", *words, "-f", "-", text=json.dumps(body))
    except AssertionError as refused:
        return str(refused)
    return ""


def refusal(kubectl: Program, namespace: str, body: dict[str, Any]) -> str:
    """Why a policy refuses an object; the API server needs a moment to learn a new one."""
    answers: list[str] = []

    def is_refused() -> bool:
        answers.append(verdict(kubectl, namespace, body, "--dry-run=server"))
        return "denied request" in answers[-1]

    eventually(is_refused)
    return answers[-1]


def admit(kubectl: Program, namespace: str, body: dict[str, Any], *words: str) -> None:
    """The API server takes an object, at the latest when it has learned that a policy changed."""
    eventually(lambda: not verdict(kubectl, namespace, body, *words))


def weak_run() -> dict[str, Any]:
    template = {"templates": [{"name": "python"}], "isolation": PROCESS}
    environment = {"name": "repos", "template": "python", "poolTemplate": template}
    return run(environments=[environment])


WEAK = [
    (pool(isolation=PROCESS), "spec.isolation.minimum: Process shares the kernel"),
    (weak_run(), "spec.roles.environments[repos].poolTemplate.isolation.minimum: Process shares"),
]


@pytest.mark.parametrize(("body", "field"), WEAK, ids=["EnvPool", "RLRun"])
def test_processes_are_refused_in_every_namespace_unless_the_platform_allows_them(
    install: Install, kubectl: Program, namespace: str, body: dict[str, Any], field: str
) -> None:
    install()
    kubectl("label", "namespace", namespace, "etude.dev/weak-isolation=allow")
    answer = refusal(kubectl, namespace, body)
    assert field in answer
    assert "have the chart installed with isolation.allowProcess=true" in answer
    admit(kubectl, namespace, pool("machines"))


@pytest.mark.parametrize(("body", "field"), WEAK, ids=["EnvPool", "RLRun"])
def test_where_the_platform_allows_processes_a_namespace_must_as_well(
    install: Install, kubectl: Program, namespace: str, body: dict[str, Any], field: str
) -> None:
    install(isolation={"allowProcess": True})
    answer = refusal(kubectl, namespace, body)
    assert field in answer
    kubectl("label", "namespace", namespace, "etude.dev/weak-isolation=allow")
    admit(kubectl, namespace, body)


def test_the_refusal_of_processes_says_which_label_is_missing(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install(isolation={"allowProcess": True})
    kubectl("label", "namespace", namespace, "etude.dev/weak-isolation=deny")

    def says_it() -> bool:
        answer = refusal(kubectl, namespace, pool(isolation=PROCESS))
        return f"have namespace {namespace} labelled etude.dev/weak-isolation=allow" in answer

    eventually(says_it)


def test_what_was_admitted_under_another_rule_can_be_scaled_and_not_weakened(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install(admission={"weakIsolation": False})
    admit(kubectl, namespace, pool(isolation=PROCESS))
    admit(kubectl, namespace, pool("machines"))
    install()
    refusal(kubectl, namespace, pool("other", isolation=PROCESS))
    patch(kubectl, namespace, "repos", {"slotsPerReplica": 2})
    kubectl("-n", namespace, "scale", "envp", "repos", "--replicas=0")
    answer = patch(kubectl, namespace, "machines", {"isolation": PROCESS}, fails=True)
    assert "spec.isolation.minimum: Process shares the kernel" in answer


def patch(
    kubectl: Program, namespace: str, name: str, spec: dict[str, Any], *, fails: bool = False
) -> str:
    body = json.dumps({"spec": spec})
    return kubectl("-n", namespace, "patch", "envp", name, "--type=merge", "-p", body, fails=fails)


def test_images_of_roles_name_a_digest_where_that_is_required(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install(requireImageDigests=True)
    tagged = run(
        trainer={"image": "local/trainer:2"},
        inference={"image": DIGEST},
        rewards={"image": "etude", "functions": [{"name": "success", "function": "Verifier"}]},
    )
    answer = refusal(kubectl, namespace, tagged)
    assert "spec.roles.trainer.image: local/trainer:2, spec.roles.rewards.image: etude: " in answer
    assert "no digest is named: write repo@sha256:…" in answer
    admit(kubectl, namespace, run(trainer={"image": DIGEST}))


def test_a_run_with_a_tag_from_before_can_still_be_suspended(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install()
    admit(kubectl, namespace, run(trainer={"image": "local/trainer:2"}))
    install(requireImageDigests=True)
    other = run(trainer={"image": "local/trainer:3"})
    other["metadata"]["name"] = "other"
    refusal(kubectl, namespace, other)
    words = ("-n", namespace, "patch", "rlr", "demo", "--type=merge", "-p")
    kubectl(*words, json.dumps({"spec": {"suspend": True}}))
    changed = {"spec": {"roles": {"trainer": {"image": "local/trainer:3"}}}}
    assert "spec.roles.trainer.image: local/trainer:3: no digest is named" in kubectl(
        *words, json.dumps(changed), fails=True
    )


@pytest.mark.parametrize(
    ("part", "item"),
    [
        ("containers", {"name": "trainer", "image": "local/trainer:2"}),
        ("initContainers", {"name": "before", "image": "local/trainer:2"}),
        ("volumes", {"name": "code", "image": {"reference": "local/trainer:2"}}),
    ],
)
def test_what_is_laid_over_pods_names_digests_too(
    install: Install, kubectl: Program, namespace: str, part: str, item: dict[str, Any]
) -> None:
    install(requireImageDigests=True)
    laid = run(trainer={"podTemplate": {"spec": {part: [item]}}})
    answer = refusal(kubectl, namespace, laid)
    assert f"spec.roles.trainer.podTemplate.spec.{part}: local/trainer:2: no digest" in answer
    text = json.dumps(laid).replace("local/trainer:2", DIGEST)
    admit(kubectl, namespace, json.loads(text))


def checkpoint(**spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(GOOD["Checkpoint"])
    made["spec"] |= spec
    return made


def test_only_the_operator_registers_what_a_run_has_saved(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install()
    owner = {"runRef": {"name": "demo", "uid": "1"}}
    registered = checkpoint(reason="Final", **owner)
    answer = refusal(kubectl, namespace, registered)
    assert "spec.reason: only the operator registers what a run has saved" in answer
    assert "take reason Manual with runRef to ask a run for a checkpoint" in answer
    assert "or reason Imported without runRef" in answer
    assert "spec.runRef: only the operator" in refusal(kubectl, namespace, checkpoint(**owner))
    admit(kubectl, namespace, checkpoint())
    registered["metadata"]["name"] = "final"
    admit(kubectl, namespace, registered, f"--as={OPERATOR}")


def test_whoever_may_create_checkpoints_asks_a_run_for_one(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install()
    refusal(kubectl, namespace, checkpoint(reason="Final", runRef={"name": "demo"}))
    asked = checkpoint_request({"metadata": {"name": "demo", "uid": "1"}})
    admit(kubectl, namespace, asked)
    by_hand = {**asked, "metadata": {"name": "before-the-change"}}
    by_hand["spec"] = {"reason": "Manual", "runRef": {"name": "demo"}}
    admit(kubectl, namespace, by_hand)


def test_a_request_for_a_checkpoint_says_nothing_of_what_it_holds(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install()
    asked = checkpoint_request({"metadata": {"name": "demo", "uid": "1"}})
    held: list[dict[str, Any]] = [
        {"step": 7},
        {"metrics": {"reward": "1"}},
        {"parentRef": {"name": "other"}},
        {"storage": {"uri": "s3://bucket/run"}},
        {"source": {"uri": "s3://bucket/state", "manifestDigest": "0" * 64}},
    ]
    for more in held:
        answer = verdict(kubectl, namespace, {**asked, "spec": {**asked["spec"], **more}})
        assert "is invalid" in answer, more
    forged = {**asked, "metadata": {"name": "forged"}, "status": {"uri": "s3://bucket/state"}}
    admit(kubectl, namespace, forged)
    made = json.loads(kubectl("-n", namespace, "get", "ckpt", "forged", "-o", "json"))
    assert "status" not in made, "only the operator's account writes it"


def test_a_tool_that_restores_backups_can_be_let_in(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install(admission={"checkpointAuthors": ["admin"]})
    admit(kubectl, namespace, checkpoint(reason="Final", runRef={"name": "demo", "uid": "1"}))


def test_a_policy_can_warn_in_place_of_refusing(
    install: Install, kubectl: Program, namespace: str
) -> None:
    install()
    refusal(kubectl, namespace, pool(isolation=PROCESS))
    install(admission={"action": "Warn"})
    admit(kubectl, namespace, pool(isolation=PROCESS))
    install(admission={"checkpoints": False})
    admit(kubectl, namespace, checkpoint(reason="Final", runRef={"name": "demo", "uid": "1"}))


def test_the_policies_hold_in_the_namespaces_that_are_served(
    install: Install, kubectl: Program, namespace: str
) -> None:
    kubectl("create", "namespace", f"{namespace}-own")
    install(watch={"namespaces": [f"{namespace}-own"]})
    refusal(kubectl, f"{namespace}-own", pool(isolation=PROCESS))
    admit(kubectl, namespace, pool(isolation=PROCESS))


def test_the_api_server_finds_nothing_doubtful_in_their_expressions(
    install: Install, kubectl: Program
) -> None:
    install(isolation={"allowProcess": True}, requireImageDigests=True)

    def policies() -> list[dict[str, Any]]:
        listed = kubectl("get", "validatingadmissionpolicies", "-o", "json")
        return list(json.loads(listed)["items"])

    eventually(lambda: all("typeChecking" in each.get("status", {}) for each in policies()))
    assert len(policies()) == 5
    for policy in policies():
        assert policy["spec"]["failurePolicy"] == "Fail"
        assert policy["status"]["typeChecking"] == {}, policy["metadata"]["name"]


def eventually(holds: Callable[[], bool], limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.5)
