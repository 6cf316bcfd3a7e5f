"""A pool of microVMs as pods of the restricted standard: brokers, node and edge, image to grade."""

import asyncio
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments.pool_client import Pool
from tests.support.vm import microvms

from etude.common.rpc import channels
from etude.envserver.drivers.vm.qemu.command_line import PROGRAM
from etude.envserver.environment_api.api_keys import KeyRole, make_key
from etude.v1 import environments_pb2, environments_pb2_grpc

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
"""Seconds on an idle machine: QEMU translates the boot."""

WITHOUT_EDGE = json.dumps([{"op": "remove", "path": "/spec/edge"}])

WARM = {"warmPerReplica": 1}

Kubectl = Callable[..., str]
Store = Mapping[str, str]

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture
def image(store: Store) -> str:
    """What a template names a pushed image by."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: `make system-deps` installs it")
    if Path("/tmp") in ROOT.parents:
        pytest.skip("pods have a /tmp of their own over the checkout: clone it somewhere else")
    keys = {"AWS_ACCESS_KEY_ID": store["access_key"], "AWS_SECRET_ACCESS_KEY": store["secret_key"]}
    push = ("push", microvms.small_image().address, "s3://etude/images")
    words = (sys.executable, "-m", "etude.envserver.images.command", *push)
    done = subprocess.run(
        (*words, "--endpoint", store["endpoint"]),
        env={**os.environ, **keys},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def pool_of(image: str, store: Store) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "machines"},
        "spec": {
            "templates": [{"name": "python", "trust": "Trusted", "image": image} | WARM],
            "isolation": {"minimum": "Process", "driver": "QemuMicroVM"},
            "replicas": 1,
            "slotsPerReplica": 4,
            "slot": {"cpu": "10m"},
            "warm": {"shellsPerReplica": 1, "maxShellsPerReplica": 2},
            "brokers": 2,
            "placement": {"nodeSelector": {"kubernetes.io/os": "linux"}, "onePerMachine": True},
            "edge": {"keysRef": {"name": "edge-keys"}},
            "store": {
                "endpoint": store["endpoint"],
                "region": "us-east-1",
                "secretRef": {"name": "s3"},
            },
        },
    }


def status_of(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    found = json.loads(kubectl("-n", namespace, "get", "envp", "machines", "-o", "json"))
    status: dict[str, Any] = found.get("status", {})
    return status


def wait_until_ready(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + LIMIT_S
    while (status := status_of(kubectl, namespace)).get("phase") != "Ready" or not status["driver"]:
        if time.monotonic() > deadline_s:
            logs = kubectl("-n", namespace, "logs", "machines-node-0", "--tail=30")
            pytest.fail(f"never Ready: {json.dumps(status, indent=1)}\n{logs}")
        time.sleep(0.5)
    return status


async def work(broker: str) -> None:
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        pool = Pool(stub, environments_pb2_grpc.PoolServiceStub(channel), "empty:")
        # The one host belongs to one of the brokers, and each of them takes this call.
        (lease,) = await pool.launch("a")
        assert lease.driver == "qemu-microvm"
        said = await pool.turn(lease, ("1", "run_terminal", {"command": "uname -n; id -u"}))
        assert said == [f"{lease.lease_id}\n1000"]
        job = environments_pb2.GradeJob(
            command="printf 1 > /logs/reward.txt",
            timeout_seconds=60,
            reward_path="/logs/reward.txt",
        )
        assert (await pool.grade(lease, job)).reward_file == b"1"


def request(ip: str, key: str, method: str, path: str, body: object = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection(ip, 7050, timeout=60)
    try:
        connection.request(method, path, json.dumps(body), {"X-API-KEY": key})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status < http.HTTPStatus.BAD_REQUEST, (answer.status, text)
        return dict(json.loads(text)) if text else {}
    finally:
        connection.close()


def pod_ip(kubectl: Kubectl, namespace: str, name: str) -> str:
    kubectl(
        "-n", namespace, "wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={LIMIT_S}s"
    )
    found = json.loads(kubectl("-n", namespace, "get", "pod", name, "-o", "json"))
    ip: str = found["status"]["podIP"]
    return ip


def test_a_restricted_pod_boots_vms_from_the_store_and_says_so(
    kubectl: Kubectl,
    namespace: str,
    store: Store,
    image: str,
    start_operator: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": store["access_key"], "AWS_SECRET_ACCESS_KEY": store["secret_key"]}
    literals = [f"--from-literal={name}={value}" for name, value in keys.items()]
    kubectl("-n", namespace, "create", "secret", "generic", "s3", *literals)
    key, line = make_key("somebody", KeyRole.FULL)
    of_edge = f"--from-literal=keys={line}"
    kubectl("-n", namespace, "create", "secret", "generic", "edge-keys", of_edge)
    start_operator("operator")
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pool_of(image, store)))

    status = wait_until_ready(kubectl, namespace)

    assert (status["driver"], status["isolation"]) == ("qemu-microvm", "Weak")
    for place in (0, 1):
        asyncio.run(work(f"{pod_ip(kubectl, namespace, f'machines-broker-{place}')}:7020"))

    edge = pod_ip(kubectl, namespace, "machines-edge-0")
    sandbox = request(edge, key, "POST", "/v2/sandboxes", {"templateID": "python"})
    request(edge, key, "DELETE", f"/sandboxes/{sandbox['sandboxID']}")

    three = json.dumps({"spec": {"brokers": 3}})
    kubectl("-n", namespace, "patch", "envp", "machines", "--type=merge", "-p", three)
    kubectl(
        "-n", namespace, "wait", "--for=create", "pod/machines-broker-2", f"--timeout={LIMIT_S}s"
    )
    kubectl("-n", namespace, "patch", "envp", "machines", "--type=json", "-p", WITHOUT_EDGE)
    kubectl("-n", namespace, "wait", "--for=delete", "pod/machines-edge-0", f"--timeout={LIMIT_S}s")
