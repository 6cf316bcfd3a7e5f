"""Pods as real processes: start, readiness, restart, drain, and nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from etude.operator.local import parent_death
from etude.operator.local.child_process import ChildProcess
from etude.operator.local.process_cluster import ProcessCluster, ProcessKubelet, process_cluster
from etude.operator.manifests import Manifest, Ref, is_true, uid

LIMIT_S = 60.0
"""Far above what a process start takes, on a machine that others load."""

SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print("up", os.environ.get("ETUDE_ATTEMPT"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(os.environ["ETUDE_PROBE_PORT"])), Handler).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PARENT = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"


@contextlib.asynccontextmanager
async def machine(folder: Path) -> AsyncIterator[ProcessCluster]:
    async with ProcessKubelet(folder=folder, base_env={"PATH": os.environ["PATH"]}) as kubelet:
        try:
            yield process_cluster(kubelet)
        finally:
            kubelet.skip_grace()


def stateful_set(script: str, *, is_probed: bool = False, grace_s: int = 30) -> Manifest:
    probe = {"httpGet": {"path": "/livez", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 5}
    container: dict[str, Any] = {
        "name": "main",
        "command": [sys.executable, "-c", script],
        "env": [{"name": "ETUDE_PROBE_PORT", "value": "8080"}],
        "ports": [{"name": "probe", "containerPort": 8080}],
    }
    if is_probed:
        container |= {"startupProbe": {**probe, "failureThreshold": 60}, "readinessProbe": probe}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "role", "namespace": "lab"},
        "spec": {
            "replicas": 1,
            "template": {
                "metadata": {"labels": {"etude.dev/attempt": "0"}},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": grace_s},
            },
        },
    }


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the cluster is polled as a person would
            await asyncio.sleep(0.02)


def pod(cluster: ProcessCluster, name: str = "role-0") -> Manifest:
    return cluster.get(Ref("Pod", "lab", name)) or {"metadata": {}, "status": {}}


def container(cluster: ProcessCluster) -> Manifest:
    found: list[Manifest] = pod(cluster).get("status", {}).get("containerStatuses", [{}])
    return found[0]


def log_of(tmp_path: Path) -> str:
    path = tmp_path / "logs/attempt-0/role-0.log"
    return path.read_text() if path.exists() else ""


async def test_a_set_becomes_a_process_that_is_ready_once_it_answers(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        cluster.upsert(stateful_set(SERVER, is_probed=True))
        assert not is_true(pod(cluster), "Ready")
        await until(lambda: is_true(pod(cluster), "Ready"))
        assert "up" in log_of(tmp_path)


async def test_scaling_to_zero_drains_the_process(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        cluster.upsert(stateful_set(SERVER, is_probed=True))
        await until(lambda: is_true(pod(cluster), "Ready"))
        manifest = stateful_set(SERVER, is_probed=True)
        manifest["spec"]["replicas"] = 0
        cluster.upsert(manifest)
        await until(lambda: cluster.get(Ref("Pod", "lab", "role-0")) is None)
        assert "drained" in log_of(tmp_path)
        assert not (tmp_path / "scratch/role-0").exists()


async def test_a_process_that_fails_starts_again_and_says_why(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        cluster.upsert(stateful_set("import sys; print('no model there'); sys.exit(78)"))
        await until(lambda: container(cluster).get("restartCount", 0) >= 2)
        ended = container(cluster)["lastState"]["terminated"]
        assert ended["exitCode"] == 78
        assert ended["message"] == "no model there"
        assert container(cluster)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
        assert log_of(tmp_path).count("=== role-0 start") >= 2


async def test_a_process_that_ignores_the_signal_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        cluster.upsert(stateful_set(STUBBORN, grace_s=1))
        await until(lambda: "running" in container(cluster).get("state", {}))
        cluster.remove(Ref("StatefulSet", "lab", "role"))
        await until(lambda: cluster.get(Ref("Pod", "lab", "role-0")) is None)


async def test_who_deletes_a_pod_may_cut_its_grace(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        key = Ref("Pod", "lab", "role-0")
        cluster.upsert(stateful_set(STUBBORN, grace_s=600))
        await until(lambda: "running" in container(cluster).get("state", {}))
        first = uid(cluster.objects()[key])
        await cluster.delete(key, uid=first, grace_s=1)
        await until(lambda: uid(cluster.get(key) or {"metadata": {}}) not in {"", first})


async def test_a_process_that_was_never_ready_does_not_get_its_whole_grace(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        manifest = stateful_set(STUBBORN, grace_s=600)
        spec = manifest["spec"]["template"]["spec"]["containers"][0]
        probe = {"httpGet": {"path": "/readyz", "port": 8080}}
        spec |= {"readinessProbe": probe, "startupProbe": {**probe, "failureThreshold": 600}}
        cluster.upsert(manifest)
        await until(lambda: "running" in container(cluster).get("state", {}))
        cluster.remove(Ref("StatefulSet", "lab", "role"))
        await until(lambda: cluster.get(Ref("Pod", "lab", "role-0")) is None)


async def test_a_process_that_ends_as_it_is_asked_to_keeps_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    child = ChildProcess.start(command, env={}, folder=tmp_path, log=tmp_path / "log")
    stat = Path(f"/proc/{child.pid}/stat")
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    child.terminate()
    assert await child.wait() == 7
    child.kill()


async def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        cluster.upsert(stateful_set(PARENT))
        await until(lambda: container(cluster).get("restartCount", 0) >= 1)
        left = int(log_of(tmp_path).splitlines()[1])
        await until(lambda: not is_alive(left))


async def test_a_command_that_does_not_exist_is_a_clear_failure(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        manifest = stateful_set("")
        manifest["spec"]["template"]["spec"]["containers"][0]["command"] = ["no-such-command"]
        cluster.upsert(manifest)
        await until(lambda: "terminated" in container(cluster).get("lastState", {}))
        ended = container(cluster)["lastState"]["terminated"]
        assert ended["exitCode"] == 127
        assert ended["message"] == "no-such-command: No such file or directory"


async def test_a_job_runs_once_and_is_complete(tmp_path: Path) -> None:
    async with machine(tmp_path) as cluster:
        manifest = stateful_set("print('done')")
        manifest |= {"apiVersion": "batch/v1", "kind": "Job"}
        manifest["spec"]["template"]["spec"]["restartPolicy"] = "Never"
        cluster.upsert(manifest)
        await until(lambda: is_true(cluster.get(Ref("Job", "lab", "role")) or {}, "Complete"))


async def test_a_job_hands_its_last_words_over(tmp_path: Path) -> None:
    script = "import os; open(os.environ['ETUDE_RESULT_FILE'], 'w').write('r' * 5000)"
    async with machine(tmp_path) as cluster:
        manifest = stateful_set(script)
        manifest |= {"apiVersion": "batch/v1", "kind": "Job"}
        template = manifest["spec"]["template"]["spec"]
        template["restartPolicy"] = "Never"
        told = {"name": "ETUDE_RESULT_FILE", "value": "/dev/termination-log"}
        template["containers"][0]["env"].append(told)
        cluster.upsert(manifest)
        await until(lambda: is_true(cluster.get(Ref("Job", "lab", "role")) or {}, "Complete"))
        ended = container(cluster)["state"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (0, "r" * 4_096)


def test_a_process_dies_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        f"tied = [sys.executable, {str(parent_death.__file__)!r}, str(os.getpid())]\n"
        "tied += ['sleep', '600']\n"
        "print(subprocess.Popen(tied).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + LIMIT_S
    while b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
