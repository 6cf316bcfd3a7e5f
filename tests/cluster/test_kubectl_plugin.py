"""`kubectl etude` as kubectl calls it, against a real API server and node."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.cut_demo import cut_demo

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "use-the-kubectl-plugin.md"
LIMIT_S = 900
"""Pods import for a minute on idle cores; a busy machine gets patience."""
FOR_EVER_S = 20
"""How long a command that ends with Ctrl-C alone is let go on."""

Done = subprocess.CompletedProcess[str]
Plugin = Callable[..., Done]
Kubectl = Callable[..., str]
Start = Callable[[str], "subprocess.Popen[bytes]"]

pytestmark = pytest.mark.timeout(3 * LIMIT_S)


def environment(cluster: Mapping[str, Any], kubeconfig: str = "") -> dict[str, str]:
    """A shell with kubectl and the plugin on its PATH."""
    ours = str(Path(sys.executable).parent)
    path = os.pathsep.join((str(cluster["binaries"]), ours, os.environ["PATH"]))
    return {**os.environ, "PATH": path, "KUBECONFIG": kubeconfig or cluster["kubeconfig"]}


@pytest.fixture(scope="session")
def etude(cluster: Mapping[str, Any]) -> Plugin:
    """`kubectl etude …`, which must end with the given code."""

    def run(*words: str, code: int = 0) -> Done:
        done = subprocess.run(
            ("kubectl", "etude", *words),
            check=False,
            capture_output=True,
            text=True,
            env=environment(cluster),
            timeout=LIMIT_S,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    return run


def manifest(name: str, trainer: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A small run whose store nobody can reach."""
    phase = {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 10,
        "optimizer": {"learningRate": "3e-3"},
        "data": [{"name": "traces", "uri": "s3://nowhere/traces.jsonl"}],
    }
    common = {"model": {"uri": "s3://nowhere/model"}, "storage": {"uri": "s3://nowhere/run"}}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": name},
        "spec": {**common, "phases": [phase], "roles": {"trainer": trainer or {}}, **spec},
    }


def sampling(name: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """A run in reinforcement learning whose role pods no node takes."""
    phase = {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 3,
        "optimizer": {"learningRate": "1e-3"},
        "tasks": [{"name": "t", "uri": "s3://nowhere/t", "environment": "repos"}],
        "algorithm": {"name": "GRPO", "groupSize": 4, "promptsPerStep": 4},
    }
    nowhere = {"nodeSelector": {"no-node": "has-this"}}
    rewards = {**nowhere, "functions": [{"name": "passed", "function": "Verifier"}]}
    roles = {"trainer": nowhere, "inference": nowhere, "rewards": rewards}
    roles |= {"environments": [{"name": "repos", "template": "python", **environment}]}
    return {**manifest(name), "spec": {**manifest(name)["spec"], "phases": [phase], "roles": roles}}


def apply(kubectl: Kubectl, namespace: str, *objects: Mapping[str, Any]) -> None:
    kubectl("-n", namespace, "apply", "-f", "-", text="\n---\n".join(map(json.dumps, objects)))


def eventually_why(etude: Plugin, namespace: str, run: str, reason: str) -> str:
    """The answer once it names this reason."""
    deadline_s = time.monotonic() + 120
    while True:
        found = json.loads(etude("why", run, "-n", namespace, "-o", "json").stdout)
        if found["reason"] == reason:
            return etude("why", run, "-n", namespace).stdout
        assert time.monotonic() < deadline_s, f"never {reason}: {found}"
        time.sleep(1)


@pytest.mark.usefixtures("crds")
def test_it_is_found_by_kubectl_under_its_name(cluster: Mapping[str, Any]) -> None:
    words = ("kubectl", "plugin", "list")
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, env=environment(cluster), timeout=60
    )
    assert f"{Path(sys.executable).parent}/kubectl-etude" in done.stdout


@pytest.mark.usefixtures("crds")
def test_an_error_of_the_user_is_one_problem_with_its_way_out(
    etude: Plugin, kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    cases: Sequence[tuple[Sequence[str], int, str]] = (
        (("why", "nobody", "-n", namespace), 3, "there is no run nobody"),
        (("why", "nobody", "-n", "no-such-place"), 3, "there is no"),
        (("status", "nobody", "--as", "eve"), 5, "eve may not get rlruns in namespace default"),
        (("top", "-A", "--as=eve"), 5, "with verb list on rlruns"),
        (("suspend", "nobody", "-n", namespace), 3, "there is no run nobody"),
        (("logs", "nobody", "-n", namespace), 3, "there is no run nobody"),
        (("why", "nobody", "--context", "x"), 2, "context was not found"),
        (("why", "nobody", "--kubeconfig", str(tmp_path / "none")), 2, "no such file"),
        (("why", "nobody", "--server", "https://127.0.0.1:1"), 6, "127.0.0.1:1 was refused"),
        (("logs", "nobody", "-f", "-p"), 2, "leave one of them out"),
        (("why", "nobody", "--context"), 2, "--context has no value"),
    )
    for words, code, said in cases:
        done = etude(*words, code=code)
        assert said in done.stderr, words
        assert done.stderr.count("fix: ") == 1, done.stderr
        assert done.stdout == ""
    apply(kubectl, namespace, manifest("demo"))
    viewer = ("create", "role", "viewer", "--verb=get", "--resource=rlruns.etude.dev")
    kubectl("-n", namespace, *viewer)
    kubectl("-n", namespace, "create", "rolebinding", "viewer", "--role=viewer", "--user=eve")
    done = etude("why", "demo", "-n", namespace, "--as", "eve")
    assert "OperatorSilent" in done.stdout
    assert "eve may not list pods in namespace" in done.stderr
    assert "eve may not list events in namespace" in done.stderr
    refused = etude("suspend", "demo", "-n", namespace, "--as", "eve", code=5)
    assert "eve may not patch rlruns" in refused.stderr


@pytest.fixture
def bare(testbed: Callable[..., Done], cluster: Mapping[str, Any]) -> Iterator[str]:
    """The kubeconfig of an API server on which nothing is installed."""
    assert cluster, "where no cluster can be, this one cannot either"
    started = testbed("up", "--level", "apiserver", "--owner", str(os.getpid()))
    assert started.returncode == 0, started.stderr
    state = json.loads(started.stdout)
    yield state["kubeconfig"]
    testbed("down", "--index", str(state["index"]))


def test_a_cluster_without_etude_says_what_to_install(etude: Plugin, bare: str) -> None:
    for words in (("why", "demo"), ("top",)):
        done = etude(*words, "--kubeconfig", bare, code=3)
        assert "this cluster knows no rlruns" in done.stderr
        assert "helm install etude" in done.stderr


@pytest.mark.usefixtures("crds")
def test_why_names_what_keeps_a_run_from_its_pods(
    etude: Plugin, kubectl: Kubectl, namespace: str, start_operator: Start
) -> None:
    start_operator("first")
    nowhere = {"nodeSelector": {"no-node": "has-this"}, "cpu": "10m"}
    secret = {"storage": {"uri": "s3://nowhere/run", "secretRef": {"name": "s3"}}}
    apply(
        kubectl,
        namespace,
        manifest("placed-nowhere", nowhere),
        manifest("unpulled", {"image": "registry.invalid/none:1"}),
        manifest("keyless", **secret),
        sampling("poolless", {"poolRef": {"name": "missing"}}),
    )
    told = eventually_why(etude, namespace, "placed-nowhere", "Unschedulable")
    assert "does not progress: no node takes placed-nowhere-trainer-0" in told
    assert "scheduler: 0/1 nodes are available" in told
    assert "it wants a node with label no-node=has-this" in told
    told = eventually_why(etude, namespace, "unpulled", "ImagePullFailed")
    assert "registry.invalid/none:1" in told
    told = eventually_why(etude, namespace, "keyless", "CreateContainerConfigError")
    assert 'secret "s3" not found' in told
    told = eventually_why(etude, namespace, "poolless", "PoolNotFound")
    assert "no EnvPool missing in this namespace" in told
    assert "kubectl get envp" in told
    kubectl("-n", namespace, "create", "secret", "generic", "s3", "--from-literal=A=b")
    told = eventually_why(etude, namespace, "keyless", "StorageUnavailable")
    assert "cannot use the object store" in told
    assert "no credentials" in told
    screen = etude("status", "placed-nowhere", "-n", namespace).stdout
    assert f"{namespace}/placed-nowhere · Provisioning" in screen
    assert "roles" in screen
    assert "0 of 1 ready; not placed-nowhere-trainer-0" in screen
    usage = json.loads(etude("top", "-n", namespace, "-o", "json").stdout)["items"]
    assert {each["name"]: each["status"] for each in usage}["placed-nowhere"] == "Provisioning"
    everywhere = etude("top", "-A", "--sort", "name").stdout
    assert "NAMESPACE" in everywhere
    assert namespace in everywhere


@pytest.mark.usefixtures("crds")
def test_why_names_a_quota_a_pool_that_is_refused_and_one_that_was_scaled_away(
    etude: Plugin, kubectl: Kubectl, namespace: str, start_operator: Start
) -> None:
    pool = {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "empty"},
        "spec": {
            "templates": [{"name": "python"}],
            "isolation": {"minimum": "Process", "driver": "Process"},
            "replicas": 0,
        },
    }
    apply(kubectl, namespace, pool)
    kubectl("-n", namespace, "create", "quota", "none", "--hard=pods=0")
    start_operator("first")
    apply(
        kubectl,
        namespace,
        manifest("over-quota"),
        sampling("waits", {"poolRef": {"name": "empty"}}),
    )
    told = eventually_why(etude, namespace, "over-quota", "WaitingForQuota")
    assert "exceeded quota: none" in told
    kubectl("-n", namespace, "delete", "quota", "none")
    told = eventually_why(etude, namespace, "waits", "Unschedulable")
    assert "also, pool empty: the pool has no hosts" in told


@pytest.mark.usefixtures("crds")
def test_suspend_and_resume_patch_the_spec_once_and_wait(
    etude: Plugin, kubectl: Kubectl, namespace: str, start_operator: Start
) -> None:
    start_operator("first")
    apply(kubectl, namespace, manifest("demo", {"nodeSelector": {"no-node": "has-this"}}))
    eventually_why(etude, namespace, "demo", "Unschedulable")
    here = ("-n", namespace)
    done = etude("suspend", "demo", "--wait", *here)
    assert "demo is suspended" in done.stderr
    generation = spec_generation(kubectl, namespace)
    assert "is true already" in etude("suspend", "demo", *here).stderr
    assert spec_generation(kubectl, namespace) == generation
    told = etude("why", "demo", *here).stdout
    assert "demo rests: spec.suspend is true  [ByUser]" in told
    assert kubectl(*here, "get", "pods", "-o", "name") == ""
    done = etude("resume", "demo", "--wait", "--timeout", "5", *here, code=7)
    assert "demo does not progress: no node takes demo-trainer-0" in done.stderr
    assert "not yet after 5 s" in done.stderr
    assert "is false already" in etude("resume", "demo", *here).stderr


def spec_generation(kubectl: Kubectl, namespace: str) -> int:
    path = "jsonpath={.metadata.generation}"
    return int(kubectl("-n", namespace, "get", "rlr", "demo", "-o", path))


EXPECTED = {
    "kubectl etude --help": (0, "suspend"),
    "kubectl etude why demo": (0, "demo progresses"),
    "kubectl etude status demo": (0, "trainer 1/1"),
    "kubectl etude watch demo": (None, "version"),
    "kubectl etude top --all-namespaces --sort steps": (0, "STEPS/H"),
    "kubectl etude checkpoint demo": (0, "Scheduled"),
    "kubectl etude checkpoint demo --now --wait": (0, "Ready at step"),
    "kubectl etude logs demo --role trainer --follow": (None, "demo-trainer-0  "),
    "kubectl etude logs demo --role trainer --previous": (3, "has not ended"),
    "kubectl etude stacks demo --role trainer": (0, "most recent call first"),
    "kubectl etude suspend demo --wait": (0, "demo is suspended"),
    "kubectl etude resume demo --wait": (0, "demo progresses"),
}
"""Exit code of each documented command and what it says; none for what goes on for ever."""


@pytest.mark.usefixtures("crds", "demo_data", "operator_pod")
@pytest.mark.long
def test_every_command_of_its_page_works_as_it_stands_on_a_run_that_trains(
    cluster: Mapping[str, Any],
    etude: Plugin,
    kubectl: Kubectl,
    lab: str,
    store: Mapping[str, str],
    tmp_path: Path,
) -> None:
    apply(kubectl, lab, tuning(store, lab))
    await_checkpoint(etude, lab)
    env = environment(cluster, kubeconfig_in(cluster, lab, tmp_path))
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.partition("#")[0].rstrip() for line in lines]
    assert {line for line in commands if " etude " in line} == set(EXPECTED)
    for command in commands:
        if command in EXPECTED:
            run_documented(command, env)
    status = json.loads(etude("status", "demo", "-n", lab, "-o", "json").stdout)["status"]
    assert status["step"]["current"] >= 50
    listed = json.loads(etude("checkpoint", "demo", "-n", lab, "-o", "json").stdout)["items"]
    assert "Suspend" in {each["spec"]["reason"] for each in listed}
    steps = [each["spec"]["step"] for each in listed]
    assert steps == sorted(steps, reverse=True)


def tuning(store: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The demo's supervised phase alone, longer than any test."""
    run = cut_demo(store, f"runs/{prefix}")
    spec = run["spec"]
    spec["phases"] = [{**spec["phases"][1], "maxSteps": 100_000}]
    spec["roles"] = {"trainer": spec["roles"]["trainer"]}
    # Each checkpoint costs a pod that reads it back.
    spec["checkpointing"] = {"everySteps": 50}
    del spec["evaluation"]
    return run


def await_checkpoint(etude: Plugin, namespace: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = json.loads(etude("status", "demo", "-n", namespace, "-o", "json").stdout)
        if found["status"].get("lastCheckpoint") and found["why"]["state"] == "Progresses":
            return
        assert found["why"]["state"] != "Failed", found
        assert time.monotonic() < deadline_s, f"never saved: {found}"
        time.sleep(2)


def kubeconfig_in(cluster: Mapping[str, Any], namespace: str, folder: Path) -> str:
    """The administrator's kubeconfig with another namespace to begin with."""
    known = json.loads(Path(cluster["kubeconfig"]).read_text(encoding="utf-8"))
    known["contexts"][0]["context"]["namespace"] = namespace
    path = folder / "kubeconfig"
    path.write_text(json.dumps(known), encoding="utf-8")
    return str(path)


def run_documented(command: str, env: Mapping[str, str]) -> None:
    code, said = EXPECTED[command]
    process = subprocess.Popen(
        shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    try:
        told, _ = process.communicate(timeout=LIMIT_S if code is not None else FOR_EVER_S)
    except subprocess.TimeoutExpired:
        assert code is None, f"{command} does not end"
        process.terminate()
        told, _ = process.communicate(timeout=60)
    else:
        assert process.returncode == code, f"{command}: {process.returncode}\n{told}"
    assert said in told, f"{command}\n{told}"
