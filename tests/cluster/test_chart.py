"""A release in a real cluster: what the API server and a node say to it."""

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHART = str(ROOT / "helm" / "etude")
HOME = "etude-second"
NAME = "second-etude-operator"

Kubectl = Callable[..., str]
Helm = Callable[..., str]

pytestmark = pytest.mark.usefixtures("crds")


@pytest.fixture(scope="module")
def release(kubectl: Kubectl, helm: Helm) -> Iterator[str]:
    """A release with all that the chart can have, in a namespace that admits restricted pods only.

    It serves its own namespace alone, beside the release that the other tests share.
    """
    if Path("/tmp") in ROOT.parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    kubectl("create", "namespace", HOME)
    kubectl("label", "namespace", HOME, "pod-security.kubernetes.io/enforce=restricted")
    values = {
        "image": "localhost/etude-base:1",
        "crds": {"enabled": False},
        "watch": {"namespaces": [HOME]},
        "networkPolicy": {"enabled": True},
        "priorityAndFairness": {"enabled": True},
        "monitoring": {"dashboards": {"enabled": True}},
    }
    words = ("--namespace", HOME, "--wait", "--timeout", "170s")
    helm("install", "second", CHART, *words, "-f", "-", text=json.dumps(values))
    yield HOME
    helm("uninstall", "second", "--namespace", HOME, "--wait")
    kubectl("delete", "namespace", HOME, "--wait=false")


def get(kubectl: Kubectl, *what: str) -> Any:
    return json.loads(kubectl("-n", HOME, "get", *what, "-o", "json"))


def pods(kubectl: Kubectl) -> list[str]:
    listed = get(kubectl, "pods", "-l", "app.kubernetes.io/component=operator")["items"]
    return [each["metadata"]["name"] for each in listed]


def test_both_replicas_are_ready_where_only_restricted_pods_are_admitted(
    release: str, kubectl: Kubectl
) -> None:
    status = get(kubectl, "deployment", NAME)["status"]
    assert status["readyReplicas"] == 2
    holder = get(kubectl, "lease", NAME)["spec"]["holderIdentity"]
    assert holder in pods(kubectl)
    events = kubectl("-n", release, "get", "events", "-o", "jsonpath={.items[*].message}")
    assert "violates PodSecurity" not in events


def test_helm_test_is_content_with_it(release: str, helm: Helm) -> None:
    said = helm("test", "second", "--namespace", release, "--logs", "--timeout", "170s")
    assert "Phase:          Succeeded" in said
    kinds = "RLRun, EnvPool, Checkpoint, PolicyRoute, EvalRun"
    assert f"{kinds} are served, and an operator leads and answers" in said


def test_the_api_server_counts_the_operators_requests_on_their_own_level(
    release: str, kubectl: Kubectl, cluster: Mapping[str, Any]
) -> None:
    name = f"second-etude.{release}"
    schema = json.loads(kubectl("get", "flowschema", name, "-o", "json"))
    token = kubectl("-n", release, "create", "token", NAME).strip()
    context = ssl.create_default_context(cafile=str(Path(cluster["run"]) / "pki" / "ca.crt"))
    server = http.client.HTTPSConnection(cluster["node_ip"], 6443, timeout=30, context=context)
    path = f"/apis/etude.dev/v1alpha1/namespaces/{release}/rlruns"
    server.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = server.getresponse()
    server.close()
    assert answer.status == http.HTTPStatus.OK
    assert answer.headers["X-Kubernetes-Pf-Flowschema-Uid"] == schema["metadata"]["uid"]


def test_a_drain_takes_one_replica_at_a_time(release: str, kubectl: Kubectl) -> None:
    first, second = pods(kubectl)
    evict(kubectl, release, first)
    answer = evict(kubectl, release, second, fails=True)
    assert "Cannot evict pod as it would violate the pod's disruption budget" in answer
    kubectl("-n", release, "rollout", "status", f"deployment/{NAME}", "--timeout=170s")


def evict(kubectl: Kubectl, namespace: str, pod: str, *, fails: bool = False) -> str:
    """Ask for an eviction, as a drain does."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    return kubectl("create", "--raw", path, "-f", "-", text=json.dumps(body), fails=fails)
