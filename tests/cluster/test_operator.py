"""The operator on a real API server, under the account that the chart gives it."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Kubectl = Callable[..., str]
Start = Callable[[str], "subprocess.Popen[bytes]"]
CHILDREN = "statefulsets,services,configmaps,poddisruptionbudgets,pods,envpools"
TAKEOVER_S = 30
"""A lease of 10 s, a retry of 2 s, and patience for a busy machine."""

pytestmark = pytest.mark.usefixtures("crds")

RUN: dict[str, Any] = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "RLRun",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"uri": "s3://nowhere/model"},
        "storage": {"uri": "s3://nowhere/run"},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 10,
                "optimizer": {"learningRate": "3e-3"},
                "data": [{"name": "traces", "uri": "s3://nowhere/traces.jsonl"}],
            }
        ],
        # No node has this label: objects are made, and no pod costs anything.
        "roles": {"trainer": {"nodeSelector": {"no-node": "has-this"}}},
    },
}


def with_name(name: str, **spec: Any) -> str:
    return json.dumps({**RUN, "metadata": {"name": name}, "spec": {**RUN["spec"], **spec}})


def get(kubectl: Kubectl, namespace: str, *what: str) -> Any:
    return json.loads(kubectl("-n", namespace, "get", *what, "-o", "json"))


def conditions(kubectl: Kubectl, namespace: str, name: str) -> dict[str, Any]:
    status = get(kubectl, namespace, "rlr", name).get("status", {})
    return {each["type"]: each for each in status.get("conditions", ())}


def eventually(holds: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.25)


def children(kubectl: Kubectl, namespace: str) -> dict[str, dict[str, Any]]:
    """Everything that carries our label, by kind and name."""
    listed = get(kubectl, namespace, CHILDREN, "-l", "app.kubernetes.io/managed-by=etude")["items"]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in listed}


def has(kubectl: Kubectl, namespace: str, *names: str) -> bool:
    return set(names) <= set(children(kubectl, namespace))


def logged(tmp_path: Path, name: str) -> str:
    return (tmp_path / f"{name}.log").read_text(encoding="utf-8", errors="replace")


@pytest.fixture(autouse=True)
def no_right_is_missing(tmp_path: Path) -> Iterator[None]:
    """No operator of any test was refused anything, or stumbled over a bug of ours."""
    yield
    for log in tmp_path.glob("*.log"):
        text = log.read_text(encoding="utf-8", errors="replace")
        assert "is forbidden: User" not in text, text
        assert "Traceback" not in text, text


def test_a_run_gets_its_children_and_says_what_it_waits_for(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    start_operator("first")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo"))
    wanted = ("StatefulSet/demo-trainer", "Service/demo-trainer", "ConfigMap/demo-run")
    eventually(lambda: has(kubectl, namespace, *wanted), "children")
    uid = get(kubectl, namespace, "rlr", "demo")["metadata"]["uid"]
    for name, child in children(kubectl, namespace).items():
        owner = child["metadata"]["ownerReferences"][0]
        assert owner["controller"], name
        assert (owner["uid"] == uid) == (child["kind"] != "Pod"), name

    def is_unschedulable() -> bool:
        found = conditions(kubectl, namespace, "demo")
        return bool(found.get("PodsScheduled", {}).get("reason") == "Unschedulable")

    eventually(is_unschedulable, "the scheduler's verdict in the status")
    run = get(kubectl, namespace, "rlr", "demo")
    assert run["status"]["observedGeneration"] == run["metadata"]["generation"]
    assert run["status"]["phase"] == "Provisioning"
    table = kubectl("-n", namespace, "get", "rlr", "-o", "wide")
    assert "Provisioning" in table
    described = kubectl("-n", namespace, "describe", "rlr", "demo")
    assert "didn't match Pod's node affinity/selector" in described
    assert "Events:" in described


def test_a_steady_run_costs_no_write(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    start_operator("first")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo"))
    eventually(lambda: has(kubectl, namespace, "Pod/demo-trainer-0"), "the pod")
    versions = settled(kubectl, namespace)
    time.sleep(10)  # two rounds of the status pace
    assert object_versions(kubectl, namespace) == versions


def object_versions(kubectl: Kubectl, namespace: str) -> dict[str, str]:
    listed = get(kubectl, namespace, f"rlr,{CHILDREN}")["items"]
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["resourceVersion"]
        for each in listed
    }


def settled(kubectl: Kubectl, namespace: str) -> dict[str, str]:
    """Versions of all objects once they have been the same for two seconds."""
    before: dict[str, str] = {}
    while (now := object_versions(kubectl, namespace)) != before:
        before = now
        time.sleep(2)
    return now


def test_suspension_releases_the_pods_and_resumption_brings_them_back(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    start_operator("first")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo"))
    eventually(lambda: has(kubectl, namespace, "Pod/demo-trainer-0"), "the pod")
    suspend(kubectl, namespace, is_wanted=True)
    eventually(
        lambda: conditions(kubectl, namespace, "demo").get("Suspended", {}).get("status") == "True",
        "condition Suspended",
    )
    assert not has(kubectl, namespace, "Pod/demo-trainer-0")
    assert get(kubectl, namespace, "rlr", "demo")["status"]["phase"] == "Suspended"
    # Suspended, so that even the model may change.
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo", model={"uri": "s3://b/m"}))
    suspend(kubectl, namespace, is_wanted=False)
    eventually(lambda: has(kubectl, namespace, "Pod/demo-trainer-0"), "the pod again")
    data = get(kubectl, namespace, "configmap", "demo-run")["data"]["run.json"]
    assert json.loads(data)["spec"]["model"]["uri"] == "s3://b/m"


def suspend(kubectl: Kubectl, namespace: str, *, is_wanted: bool) -> None:
    body = json.dumps({"spec": {"suspend": is_wanted}})
    kubectl("-n", namespace, "patch", "rlr", "demo", "--type=merge", "-p", body)


def test_an_update_reaches_the_roles_and_is_observed(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    start_operator("first")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo"))
    eventually(lambda: has(kubectl, namespace, "ConfigMap/demo-run"), "children")
    changed = with_name("demo", checkpointing={"keepLast": 7})
    kubectl("-n", namespace, "apply", "-f", "-", text=changed)

    def has_arrived() -> bool:
        data = get(kubectl, namespace, "configmap", "demo-run")["data"]["run.json"]
        run = get(kubectl, namespace, "rlr", "demo")
        observed = run["status"].get("observedGeneration") == run["metadata"]["generation"]
        return bool(json.loads(data)["spec"]["checkpointing"]["keepLast"] == 7 and observed)

    eventually(has_arrived, "the new number in the run's ConfigMap")


def test_a_deleted_run_leaves_nothing_also_while_the_operator_is_down(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    operator = start_operator("first")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo"))
    eventually(lambda: has(kubectl, namespace, "Pod/demo-trainer-0"), "the pod")
    operator.kill()
    operator.wait(timeout=30)
    kubectl("-n", namespace, "delete", "rlr", "demo", "--timeout=30s")
    eventually(lambda: children(kubectl, namespace) == {}, "garbage collection")


def test_what_cannot_work_is_said_in_the_status(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    start_operator("first")
    shared = with_name("demo", storage={"uri": "file:///shared/run"})
    kubectl("-n", namespace, "apply", "-f", "-", text=shared)
    eventually(lambda: "Accepted" in conditions(kubectl, namespace, "demo"), "a verdict")
    accepted = conditions(kubectl, namespace, "demo")["Accepted"]
    assert accepted["status"] == "False"
    assert "pods share no folders; use s3://bucket/prefix" in accepted["message"]
    assert children(kubectl, namespace) == {}


def test_an_object_of_somebody_else_is_left_alone_and_named(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    kubectl("-n", namespace, "create", "service", "clusterip", "demo-trainer", "--tcp=80")
    before = get(kubectl, namespace, "service", "demo-trainer")
    start_operator("first")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("demo"))

    def is_named() -> bool:
        found = json.dumps(conditions(kubectl, namespace, "demo"))
        return "NameConflict" in found and "demo-trainer" in found

    eventually(is_named, "the conflict in the conditions")
    after = get(kubectl, namespace, "service", "demo-trainer")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_an_operator_killed_mid_way_leaves_work_that_the_next_one_finishes(
    start_operator: Start, kubectl: Kubectl, namespace: str
) -> None:
    names = [f"run-{number}" for number in range(8)]
    first = start_operator("first")
    many = "\n---\n".join(with_name(name) for name in names)
    kubectl("-n", namespace, "apply", "-f", "-", text=many)
    eventually(lambda: len(children(kubectl, namespace)) >= 4, "the first children")
    first.kill()
    first.wait(timeout=30)
    left = children(kubectl, namespace)
    start_operator("second")
    wanted = [
        f"{kind}/{name}-{suffix}"
        for name in names
        for kind, suffix in (
            *(("StatefulSet", "trainer"), ("Service", "trainer"), ("ConfigMap", "run")),
            ("Pod", "trainer-0"),
        )
    ]
    eventually(lambda: has(kubectl, namespace, *wanted), "all children", 120)
    now = children(kubectl, namespace)
    assert set(now) == set(wanted), "nothing twice, nothing else"
    for name, child in left.items():
        assert now[name]["metadata"]["uid"] == child["metadata"]["uid"], f"{name} was made anew"


def test_of_two_operators_one_acts_and_the_other_takes_over(
    start_operator: Start, kubectl: Kubectl, namespace: str, tmp_path: Path, chart: str
) -> None:
    first = start_operator("first")
    eventually(lambda: holder(kubectl, chart) == "first", "the first leads")
    start_operator("second")
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("one"))
    eventually(lambda: has(kubectl, namespace, "Pod/one-trainer-0"), "the pod")
    assert holder(kubectl, chart) == "first"
    first.kill()
    first.wait(timeout=30)
    kubectl("-n", namespace, "apply", "-f", "-", text=with_name("two"))
    eventually(lambda: has(kubectl, namespace, "Pod/two-trainer-0"), "takeover", TAKEOVER_S)
    assert holder(kubectl, chart) == "second"


def holder(kubectl: Kubectl, home: str) -> str:
    path = "jsonpath={.spec.holderIdentity}"
    found = kubectl("-n", home, "get", "lease", "etude-operator", "--ignore-not-found", "-o", path)
    return found.strip()
