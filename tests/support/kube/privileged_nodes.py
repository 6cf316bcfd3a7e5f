"""Privileged nodes of the chart: the release with them, and what their tests ask of the cluster."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments.pool_client import Pool
from tests.support.kube.testbeds import Program

from etude.v1 import environments_pb2

CHART = Path(__file__).parents[3] / "helm" / "etude"
LIMIT_S = 300
NODES = "vms"
POOL = "machines"
_RIGHTS = ("roles", "rolebindings", "clusterroles", "clusterrolebindings")


def make_namespace(kubectl: Program) -> None:
    """The namespace that admits privileged pods, without any."""
    kubectl("create", "namespace", NODES)
    kubectl("label", "namespace", NODES, "pod-security.kubernetes.io/enforce=privileged")


def upgrade(
    kubectl: Program,
    helm: Program,
    chart: str,
    nodes: Mapping[str, Any],
    *,
    has_operator: bool = False,
) -> None:
    """The release with these nodes; without its operator where that is a process of the test."""
    given = ("--namespace", chart, "--reuse-values", "--set-json", f"nodes={json.dumps(nodes)}")
    helm("upgrade", "etude", str(CHART), *given)
    if not has_operator:
        kubectl("-n", chart, "scale", "deployment/etude-operator", "--replicas=0")
        # One that ends knows nothing of these nodes, and would make hosts itself.
        pods = ("pod", "-l", "app.kubernetes.io/component=operator", f"--timeout={LIMIT_S}s")
        kubectl("-n", chart, "wait", "--for=delete", *pods)


def remove_nodes(kubectl: Program, helm: Program, chart: str) -> None:
    """The release as other tests expect it; the next nodes begin with an empty namespace."""
    upgrade(kubectl, helm, chart, {"namespace": "", "pools": [], "drainSeconds": 600})
    kubectl("delete", "namespace", NODES, f"--timeout={LIMIT_S}s")


def rights(kubectl: Program) -> dict[str, list[Any]]:
    """Rules and subjects of everything in the cluster, by kind and name."""
    found = {}
    for kind in _RIGHTS:
        listed = json.loads(kubectl("get", kind, "-A", "-o", "json"))["items"]
        for each in listed:
            meta = each["metadata"]
            name = f"{kind}/{meta.get('namespace', '')}/{meta['name']}"
            found[name] = [each.get(key) for key in ("rules", "roleRef", "subjects")]
    return found


def wait_until_ready(kubectl: Program, namespace: str) -> dict[str, Any]:
    """Status of the pool, once it has a driver."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = json.loads(kubectl("-n", namespace, "get", "envp", POOL, "-o", "json"))
        status: dict[str, Any] = found.get("status", {})
        if status.get("phase") == "Ready" and status.get("driver"):
            return status
        if time.monotonic() > deadline_s:
            pods = kubectl("-n", NODES, "describe", "pods")
            logs = kubectl("-n", NODES, "logs", "-l", "etude.dev/role=node", "--tail=40")
            pytest.fail(f"never Ready: {json.dumps(status, indent=1)}\n{pods[-4000:]}\n{logs}")
        time.sleep(0.5)


def node_pods(kubectl: Program) -> list[str]:
    """Names of the nodes' pods that are not being deleted."""
    found = json.loads(kubectl("-n", NODES, "get", "pods", "-o", "json"))["items"]
    metas = (each["metadata"] for each in found)
    return [str(meta["name"]) for meta in metas if "deletionTimestamp" not in meta]


def broker_address(kubectl: Program, namespace: str) -> str:
    """host:port of the pool's one broker."""
    found = json.loads(kubectl("-n", namespace, "get", "pod", f"{POOL}-broker-0", "-o", "json"))
    return f"{found['status']['podIP']}:7020"


def on_node(kubectl: Program, pod: str, script: str) -> str:
    """What a shell in a node's pod prints."""
    return kubectl("-n", NODES, "exec", pod, "-c", "node", "--", "/bin/sh", "-c", script)


def kill_daemon(kubectl: Program, pod: str) -> None:
    """Kill the daemon in a node's pod, not the supervisor above it."""
    script = (
        "for each in /proc/[0-9]*; do"
        " [ $each != /proc/1 ] && tr '\\0' ' ' < $each/cmdline 2>/dev/null |"
        " grep -q 'etude.envserver.main nod[e]' && kill -9 ${each#/proc/}; done; true"
    )
    on_node(kubectl, pod, script)


async def read_again(pool: Pool, lease: environments_pb2.Lease, command: str = "cat mine") -> str:
    """Output of a command, once the lease's node answers again."""
    deadline_s = time.monotonic() + 90
    while True:
        try:
            call = (secrets.token_hex(8), "run_terminal", {"command": command})
            (found,) = await pool.turn(lease, call)
        except Exception:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.2)
        else:
            return found
