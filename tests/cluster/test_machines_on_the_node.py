"""A pool of microVMs as pods of the restricted standard: image from the store, tools, a grade."""

import asyncio
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
from tests.support import microvms
from tests.support.pool_client import Pool

from etude.common import channels
from etude.envserver.drivers.qemu.machine import PROGRAM
from etude.v1 import environments_pb2, environments_pb2_grpc

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
"""Seconds on an idle machine: QEMU translates the boot."""

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
            "templates": [{"name": "python", "trust": "Trusted", "image": image}],
            "isolation": {"minimum": "Process", "driver": "QemuMicroVM"},
            "replicas": 1,
            "slotsPerReplica": 4,
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


def test_a_restricted_pod_boots_machines_from_the_store_and_says_so(
    kubectl: Kubectl,
    namespace: str,
    store: Store,
    image: str,
    start_operator: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": store["access_key"], "AWS_SECRET_ACCESS_KEY": store["secret_key"]}
    literals = [f"--from-literal={name}={value}" for name, value in keys.items()]
    kubectl("-n", namespace, "create", "secret", "generic", "s3", *literals)
    start_operator("operator")
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pool_of(image, store)))

    status = wait_until_ready(kubectl, namespace)

    assert (status["driver"], status["isolation"]) == ("qemu-microvm", "Weak")
    pod = json.loads(kubectl("-n", namespace, "get", "pod", "machines-broker-0", "-o", "json"))
    asyncio.run(work(f"{pod['status']['podIP']}:7020"))
