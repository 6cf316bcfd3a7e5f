"""The demo's run, cut to a few steps, as pods on a real node."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.cut_demo import cut_demo

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out"
LIMIT_S = 900
"""Two minutes on idle cores, most of it imports; a busy machine gets patience."""

Kubectl = Callable[..., str]
Store = Mapping[str, str]

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(3 * LIMIT_S)]


def get(kubectl: Kubectl, namespace: str, *what: str) -> Any:
    return json.loads(kubectl("-n", namespace, "get", *what, "-o", "json"))


def wait_until(
    kubectl: Kubectl, namespace: str, holds: Callable[[dict[str, Any]], bool], what: str
) -> dict[str, Any]:
    """The run once it is so; a run that failed ends the wait with its status."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        run: dict[str, Any] = get(kubectl, namespace, "rlr", "demo")
        if holds(run):
            return run
        state = json.dumps(run.get("status", {}), indent=1)
        assert run.get("status", {}).get("phase") != "Failed", state
        assert time.monotonic() < deadline_s, f"never: {what}\n{state}\n{pods(kubectl, namespace)}"
        time.sleep(1)


def pods(kubectl: Kubectl, namespace: str) -> str:
    """What each pod is up to and its last words."""
    listed = get(kubectl, namespace, "pods")["items"]
    names = [each["metadata"]["name"] for each in listed]
    logs = [kubectl("-n", namespace, "logs", name, "--tail=15") for name in names]
    shown = kubectl("-n", namespace, "get", "pods", "-o", "wide")
    return "\n".join([shown, *(f"== {n}\n{text}" for n, text in zip(names, logs, strict=True))])


def phase_of(run: dict[str, Any]) -> str:
    return str(run.get("status", {}).get("phase", ""))


def at_step(run: dict[str, Any]) -> int:
    return int(run.get("status", {}).get("step", {}).get("current", 0))


@pytest.mark.usefixtures("demo_data", "operator_pod")
@pytest.mark.long
def test_the_demos_run_trains_on_the_node_from_first_phase_to_last(
    kubectl: Kubectl, lab: str, store: Store
) -> None:
    run = cut_demo(store, f"runs/{lab}")
    kubectl("-n", lab, "apply", "-f", "-", text=json.dumps(run))
    wait_until(kubectl, lab, lambda r: r.get("status", {}).get("activePhase") == "rl", "phase rl")
    working = shown(kubectl, lab)
    done = wait_until(kubectl, lab, lambda r: phase_of(r) == "Succeeded", "Succeeded")
    keep("cluster.txt", working + "\n" + shown(kubectl, lab))
    status = done["status"]
    assert status["step"] == {"current": 3, "target": 3, "text": "3/3"}
    assert status["policyVersion"] >= 3
    assert status["rollouts"]["trained"] > 0
    assert status["rollouts"]["inFlight"] == 0
    final = [c for c in get(kubectl, lab, "ckpt")["items"] if c["spec"]["reason"] == "Final"]
    assert [each["status"]["phase"] for each in final] == ["Ready"]
    kubectl("-n", lab, "delete", "rlr", "demo", "--timeout=60s")
    gone = "--for=delete"
    kubectl("-n", lab, "wait", gone, "pod", "--all", "--timeout=120s")
    assert get(kubectl, lab, "statefulsets,envpools")["items"] == []


@pytest.mark.usefixtures("demo_data", "operator_pod")
def test_a_suspended_run_goes_on_at_the_step_after_its_checkpoint(
    kubectl: Kubectl, lab: str, store: Store
) -> None:
    run = cut_demo(store, f"runs/{lab}")
    spec = run["spec"]
    spec["phases"] = [{**spec["phases"][1], "maxSteps": 2_000}]
    spec["roles"] = {"trainer": spec["roles"]["trainer"]}
    del spec["evaluation"]
    kubectl("-n", lab, "apply", "-f", "-", text=json.dumps(run))
    wait_until(kubectl, lab, lambda r: at_step(r) >= 5, "five steps")
    patch(kubectl, lab, {"suspend": True})
    suspended = wait_until(kubectl, lab, lambda r: phase_of(r) == "Suspended", "Suspended")
    assert get(kubectl, lab, "pods")["items"] == []
    saved = [each["spec"]["step"] for each in get(kubectl, lab, "ckpt")["items"]]
    assert max(saved) >= at_step(suspended) >= 5
    wanted = max(saved) + 10
    patch(kubectl, lab, {"suspend": False, "phases": [{**spec["phases"][0], "maxSteps": wanted}]})
    done = wait_until(kubectl, lab, lambda r: phase_of(r) == "Succeeded", "Succeeded")
    assert at_step(done) == wanted
    rows = metrics(store, lab)
    steps = [row["global_step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, wanted + 1)), "each step once, in order"


@pytest.mark.long
@pytest.mark.usefixtures("demo_data", "operator_pod")
def test_a_trainer_that_is_evicted_saves_first_and_goes_on_where_it_stopped(
    kubectl: Kubectl, lab: str, store: Store
) -> None:
    run = cut_demo(store, f"runs/{lab}")
    spec = run["spec"]
    spec["phases"] = [{**spec["phases"][1], "maxSteps": 2_000}]
    spec["roles"] = {"trainer": spec["roles"]["trainer"]}
    spec["checkpointing"] = {"everySteps": 10_000}
    spec["failurePolicy"] = {"maxRestarts": 0}
    del spec["evaluation"]
    kubectl("-n", lab, "apply", "-f", "-", text=json.dumps(run))
    before = at_step(wait_until(kubectl, lab, lambda r: at_step(r) >= 5, "five steps"))
    metadata = {"name": "demo-trainer-0", "namespace": lab}
    order = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    where = f"/api/v1/namespaces/{lab}/pods/demo-trainer-0/eviction"
    kubectl("create", "--raw", where, "-f", "-", text=json.dumps(order))
    wait_until(kubectl, lab, lambda r: bool(saved_steps(kubectl, lab)), "the new one tells of it")
    (saved,) = saved_steps(kubectl, lab)
    assert saved >= before
    resumed = wait_until(kubectl, lab, lambda r: at_step(r) > saved, "it goes on")
    restarts = resumed["status"]["restarts"]
    assert (restarts["infra"], restarts["total"], resumed["status"]["attempt"]) == (1, 0, 0)
    patch(kubectl, lab, {"suspend": True})
    wait_until(kubectl, lab, lambda r: phase_of(r) == "Suspended", "Suspended")
    wanted = max(saved_steps(kubectl, lab)) + 5
    patch(kubectl, lab, {"suspend": False, "phases": [{**spec["phases"][0], "maxSteps": wanted}]})
    wait_until(kubectl, lab, lambda r: phase_of(r) == "Succeeded", "Succeeded")
    rows = metrics(store, lab)
    steps = [row["global_step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, wanted + 1)), "each step once, in order"


def saved_steps(kubectl: Kubectl, namespace: str) -> list[int]:
    return [int(each["spec"]["step"]) for each in get(kubectl, namespace, "ckpt")["items"]]


def patch(kubectl: Kubectl, namespace: str, spec: dict[str, Any]) -> None:
    kubectl(
        "-n", namespace, "patch", "rlr", "demo", "--type=merge", "-p", json.dumps({"spec": spec})
    )


def metrics(store: Store, prefix: str) -> list[dict[str, Any]]:
    """The run's own record, in order."""
    folder = Path(store["folder"]) / "runs" / prefix
    files = sorted(path for path in folder.rglob("*.jsonl") if "metrics" in str(path))
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def shown(kubectl: Kubectl, namespace: str) -> str:
    """What people type to see how a run is doing."""
    table = kubectl("-n", namespace, "get", "rlr,envp,ckpt", "-o", "wide")
    return f"{table}\n{kubectl('-n', namespace, 'describe', 'rlr', 'demo')}"


def keep(name: str, text: str) -> None:
    """Leave a figure where benches leave theirs, and print it for `pytest -s`."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / name).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
