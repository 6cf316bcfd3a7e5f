"""The three kinds in a real cluster: what may change, what kubectl shows, how pools scale."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.schema import crd

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = str(EXAMPLES / "demo" / "rlrun.yaml")
STARTED = {"startTime": "2026-01-01T00:00:00Z"}
SUSPENDED = {"type": "Suspended", "status": "True", "reason": "ByUser"}
WHILE_RUNNING: dict[str, Any] = {
    "checkpointing": {"keepLast": 5},
    "evaluation": [],
    "failurePolicy": {"maxRestarts": 5},
    "deadlines": {"activeSeconds": 3_600},
    "observability": {"otlpEndpoint": "http://collector:4317"},
}
SCHEDULE = [{"cron": "0 8 * * 1-5", "minIdle": 8}]
Kubectl = Callable[..., str]

pytestmark = pytest.mark.usefixtures("crds")


def patch(kubectl: Kubectl, what: str, spec: dict[str, Any], **options: bool) -> str:
    body = json.dumps({"spec": spec})
    return kubectl("patch", *what.split(), "--type=merge", "-p", body, **options)


def report(kubectl: Kubectl, what: str, status: dict[str, Any]) -> None:
    """Write a status, as the operator does."""
    body = json.dumps({"status": status})
    kubectl("patch", *what.split(), "--subresource=status", "--type=merge", "-p", body)


def test_what_a_process_reads_once_stays_while_the_run_holds_pods(
    kubectl: Kubectl, namespace: str
) -> None:
    kubectl("-n", namespace, "apply", "-f", RUN)
    demo = f"-n {namespace} rlr demo"
    patch(kubectl, demo, {"model": {"seed": 1}})  # nothing has started yet
    report(kubectl, demo, STARTED)
    spec = json.loads(kubectl("-n", namespace, "get", "rlr", "demo", "-o", "json"))["spec"]
    longer = [*spec["phases"][:-1], {**spec["phases"][-1], "maxSteps": 60}]
    changes: dict[str, Any] = {
        "model": {"seed": 2},
        "storage": {"uri": "s3://other/run"},
        "phases": longer,
        "roles": {"trainer": {"rolloutWorkers": 2}},
        "weights": {"advanced": {"retainVersions": 8}},
        "scheduling": {"priorityClassName": "high"},
    }
    assert changes.keys() == set(crd.FROZEN)
    for field, value in changes.items():
        answer = patch(kubectl, demo, {field: value}, fails=True)
        assert f"spec.{field} is immutable while the run holds pods" in answer
        assert "set spec.suspend=true and wait for condition Suspended" in answer
    patch(kubectl, demo, WHILE_RUNNING)
    patch(kubectl, demo, {"suspend": True})
    report(kubectl, demo, {**STARTED, "conditions": [SUSPENDED]})
    patch(kubectl, demo, {"suspend": False, **changes})


def test_what_a_checkpoint_is_never_changes_but_its_pin_does(
    kubectl: Kubectl, namespace: str
) -> None:
    kubectl("-n", namespace, "apply", "-f", str(EXAMPLES / "checkpoint.yaml"))
    state = f"-n {namespace} ckpt demo-import"
    refused: dict[str, Any] = {
        "reason": "Final",
        "source": {"uri": "s3://other/state"},
        "runRef": {"name": "demo", "uid": "1"},
    }
    for field, value in refused.items():
        answer = patch(kubectl, state, {field: value}, fails=True)
        assert f"spec.{field} is immutable" in answer
    patch(kubectl, state, {"pinned": True})


def test_a_pool_scales_by_its_subresource(kubectl: Kubectl, namespace: str) -> None:
    kubectl("-n", namespace, "apply", "-f", str(EXAMPLES / "envpool.yaml"))
    kubectl("-n", namespace, "scale", "envp", "python-repos", "--replicas=3")
    replicas = "jsonpath={.spec.replicas}"
    assert kubectl("-n", namespace, "get", "envp", "python-repos", "-o", replicas) == "3"
    refused = kubectl(
        "-n", namespace, "scale", "envp", "python-repos", "--replicas=10001", fails=True
    )
    assert "should be less than or equal to 10000" in refused


def test_nobody_scales_a_pool_beyond_its_most_or_one_that_sizes_itself(
    kubectl: Kubectl, namespace: str
) -> None:
    kubectl("-n", namespace, "apply", "-f", str(EXAMPLES / "envpool.yaml"))
    pool = f"-n {namespace} envp python-repos"
    scale = ("-n", namespace, "scale", "envp", "python-repos")
    patch(kubectl, pool, {"maxReplicas": 4})
    refused = kubectl(*scale, "--replicas=5", fails=True)
    assert "replicas must be at most maxReplicas" in refused
    refused = patch(kubectl, pool, {"autoscaling": {}}, fails=True)
    assert "the operator decides how many hosts there are" in refused
    patch(kubectl, pool, {"autoscaling": {"schedule": SCHEDULE}, "replicas": None})
    refused = kubectl(*scale, "--replicas=3", fails=True)
    assert "the operator decides how many hosts there are" in refused
    shown = json.loads(kubectl("-n", namespace, "get", "envp", "python-repos", "-o", "json"))
    assert shown["spec"]["autoscaling"]["mode"] == "Predictive"
    assert shown["spec"]["autoscaling"]["schedule"][0]["timeZone"] == "UTC"
    patch(kubectl, pool, {"autoscaling": None, "replicas": 2})


def test_whoever_scales_a_pool_in_mode_external_finds_its_figures(
    kubectl: Kubectl, namespace: str
) -> None:
    kubectl("-n", namespace, "apply", "-f", str(EXAMPLES / "envpool.yaml"))
    pool = f"-n {namespace} envp python-repos"
    patch(kubectl, pool, {"autoscaling": {"mode": "External"}})
    report(kubectl, pool, {"replicas": 2, "selector": "etude.dev/pool=python-repos"})
    path = f"/apis/etude.dev/v1alpha1/namespaces/{namespace}/envpools/python-repos/scale"
    scale = json.loads(kubectl("get", "--raw", path))
    assert scale["spec"]["replicas"] == 2
    assert scale["status"] == {"replicas": 2, "selector": "etude.dev/pool=python-repos"}


def test_kubectl_shows_the_columns_by_short_name_and_by_category(
    kubectl: Kubectl, namespace: str
) -> None:
    examples = ("envpool.yaml", "checkpoint.yaml", "policyroute.yaml", "evalrun.yaml")
    for file in (RUN, *(str(EXAMPLES / name) for name in examples)):
        kubectl("-n", namespace, "apply", "-f", file)
    assert "demo" in kubectl("-n", namespace, "get", "etude")
    for kind in crd.KINDS:
        header = kubectl("-n", namespace, "get", kind.short, "-o", "wide").splitlines()[0]
        assert header.split() == ["NAME", *(column.name.upper() for column in kind.columns)]


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_kubectl_explains_every_field(kubectl: Kubectl, kind: crd.CrdKind) -> None:
    text = kubectl("explain", kind.plural, "--recursive", "--api-version=etude.dev/v1alpha1")
    assert "<no description>" not in kubectl("explain", f"{kind.plural}.spec")
    for name in kind.spec.model_json_schema()["properties"]:
        assert name in text
