"""The cluster that the other tests stand on does what a cluster does, and leaves nothing behind."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "probe"},
    "spec": {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "probe",
                "image": "localhost/etude-base:1",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    },
}
ASKS = """
import os, socket, etude.common.api.run.spec
print(os.getuid(), socket.gethostbyname("kubernetes.default.svc.cluster.local"))
"""


def test_a_restricted_pod_runs_our_code_and_finds_services_by_name(
    kubectl: Callable[..., str], namespace: str
) -> None:
    pod: dict[str, Any] = json.loads(json.dumps(POD))
    pod["spec"]["containers"][0]["command"] = ["python", "-c", ASKS]
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pod))
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kubectl("-n", namespace, "wait", done, "pod/probe", "--timeout=60s")
    user, address = kubectl("-n", namespace, "logs", "probe").split()
    assert user == "10001"
    assert address.endswith(".0.1")


LOGS = "/var/log/containers"
"""A folder that a machine without a kubelet has only for clusters like ours."""


def test_a_privileged_pod_is_refused(kubectl: Callable[..., str], namespace: str) -> None:
    pod: dict[str, Any] = json.loads(json.dumps(POD))
    pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    answer = kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pod), fails=True)
    assert 'violates PodSecurity "restricted' in answer


def test_a_second_cluster_survives_kill_9_of_its_api_server_and_leaves_nothing(
    cluster: Mapping[str, Any], testbed: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    started = testbed("up", "--level", "apiserver", "--owner", str(os.getpid()))
    assert started.returncode == 0, started.stderr
    state = json.loads(started.stdout)
    assert state["index"] != cluster["index"]
    index = str(state["index"])
    try:
        again = testbed("restart", "kube-apiserver", "--index", index, "--signal", "KILL")
        assert again.returncode == 0, again.stderr
        wait_until_ready(state)
        assert f"cluster {index}" in testbed("status").stdout
        assert traces(state)
    finally:
        testbed("down", "--index", index)
    assert not Path(state["run"]).exists()
    assert not traces(state)


def test_a_cluster_that_goes_leaves_others_what_they_have_mounted(
    cluster: Mapping[str, Any], testbed: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    before = private_mounts(cluster)
    assert LOGS in before
    started = testbed("up", "--level", "apiserver", "--owner", str(os.getpid()))
    assert started.returncode == 0, started.stderr
    state = json.loads(started.stdout)
    # As if this cluster had been the first of the machine, which made the folder.
    (Path(state["run"]) / "created").write_text(LOGS, encoding="utf-8")
    testbed("down", "--index", str(state["index"]))
    assert Path(LOGS).is_dir()
    assert private_mounts(cluster) == before


def test_down_without_a_number_leaves_the_clusters_of_running_tests(
    testbed: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    used = tmp_path / ".cache" / "etude" / "testbed" / "cluster-0"
    used.mkdir(parents=True)
    (used / "cluster.json").write_text(json.dumps({"owner": os.getpid()}))
    done = testbed("down")
    assert done.returncode == 0, done.stderr
    assert used.is_dir()


def private_mounts(cluster: Mapping[str, Any]) -> set[str]:
    """Where the cluster has folders of its own in place of the machine's."""
    holder = (Path(cluster["run"]) / "pid" / "init").read_text(encoding="utf-8")
    mounts = Path(f"/proc/{holder}/mounts").read_text(encoding="utf-8").splitlines()
    return {line.split()[1] for line in mounts if not line.startswith(("proc ", "sysfs "))}


def wait_until_ready(state: Mapping[str, Any]) -> None:
    program = str(Path(state["binaries"]) / "kubectl")
    asks = (program, "--kubeconfig", state["kubeconfig"], "get", "--raw", "/readyz")
    deadline_s = time.monotonic() + 300  # two control planes on two busy cores
    while subprocess.run(asks, check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline_s, "the API server did not come back"
        time.sleep(0.2)


def traces(state: Mapping[str, Any]) -> set[str]:
    """What is on the machine of a cluster; those of others come and go meanwhile."""
    index = state["index"]
    links = {path.name for path in Path("/sys/class/net").glob(f"tb{index}h")}
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob(f"*/etude-testbed-{index}")}
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    folders = {line.split()[1] for line in mounts.splitlines()}
    return links | groups | {each for each in folders if each.startswith(f"{state['run']}/")}
