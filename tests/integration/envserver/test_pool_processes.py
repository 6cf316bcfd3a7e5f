"""Broker and node as processes: started wrongly, told to stop, killed at work."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.environments.pool_processes import START_TIMEOUT_S, Processes

from etude.v1 import environments_pb2

FIX = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
TEST = ("run_terminal", {"command": "pytest -q"})
Driver = Any  # the fixture only proves that this machine allows namespaces


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


async def started(processes: Processes, connect: Callable[..., Any], source: str) -> Any:
    for role in ("broker", "node"):
        processes.start(role)
    for role in ("broker", "node"):
        await processes.ready(role)
    return connect(f"127.0.0.1:{processes.ports['broker']}", source)


async def until_answered(work: Callable[[], Any]) -> Any:
    """What a client does while a service is away: the same call again.

    Raises:
        AioRpcError: the service is there and refuses.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                return await work()
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)


def names(leases: Sequence[environments_pb2.Lease]) -> list[str]:
    return [lease.lease_id for lease in leases]


async def test_leases_outlive_a_killed_host(
    driver: Driver, processes: Processes, connect: Callable[..., Any], source: str
) -> None:
    pool = await started(processes, connect, source)
    leases = await pool.launch("a", 3)
    fixed = ("1", "search_replace", FIX)
    assert await pool.turn(leases[0], fixed) == ["ok"]
    running = asyncio.create_task(
        until_answered(lambda: pool.turn(leases[1], ("1", "run_terminal", {"command": "sleep 1"})))
    )
    await asyncio.sleep(0.3)

    processes.kill("node")
    processes.start("node")

    assert await until_answered(lambda: pool.turn(leases[0], fixed)) == ["ok"]
    assert await pool.turn(leases[0], ("2", *TEST)) == ["1 passed"]
    assert len((await pool.diff(leases[0])).written) == 1
    assert await running == ["(no output)"]
    assert names(await pool.launch("a", 3)) == names(leases)


async def test_leases_outlive_a_killed_broker(
    driver: Driver, processes: Processes, connect: Callable[..., Any], source: str
) -> None:
    pool = await started(processes, connect, source)
    leases = await pool.launch("a", 3)
    processes.kill("broker")

    assert await pool.turn(leases[0], ("1", *TEST)) == ["FAILED test_add\n1 failed"]
    processes.start("broker")
    await processes.ready("broker")

    again = await until_answered(lambda: pool.launch("a", 3))
    assert names(again) == names(leases)
    renewed = await pool.broker.RenewLeases(
        environments_pb2.RenewLeasesRequest(lease_ids=names(leases), ttl_seconds=99)
    )
    assert not renewed.missing_lease_ids
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.launch("a", 2)
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_told_to_stop_both_end_well_and_tell_what_they_did(
    driver: Driver, processes: Processes, connect: Callable[..., Any], source: str
) -> None:
    pool = await started(processes, connect, source)
    (lease,) = await pool.launch("a")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    request = environments_pb2.RunTurnRequest(
        lease_id=lease.lease_id,
        agent_token=lease.agent_token,
        calls=[
            environments_pb2.ToolCall(
                call_id="1", name="run_terminal", arguments_json='{"command": "pytest -q"}'
            )
        ],
    )
    metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
    await pool.node(lease).RunTurn(request, metadata=metadata)
    text = await asyncio.to_thread(processes.metrics, "node")
    assert 'etude_env_cache_total{result="miss"} 1.0' in text
    assert 'etude_env_environments{state="leased"} 1.0' in text

    for role in ("node", "broker"):
        processes.running[role].send_signal(signal.SIGTERM)
    for role in ("node", "broker"):
        status = await asyncio.to_thread(processes.running[role].wait, 60)
        assert status == 0, processes.log(role)

    rows = [
        json.loads(line)
        for line in (processes.folder / "traces.jsonl").read_text().split("\n")[:-1]
    ]
    (span,) = (row for row in rows if row["name"] == "execute_tool run_terminal")
    assert (span["trace_id"], span["service"]) == (trace_id, "etude-node")


@pytest.mark.parametrize(
    ("role", "changes", "status", "said"),
    [
        ("node", {"ETUDE_POOL_FILE": "/no/such/file"}, 78, "/no/such/file"),
        (
            "node",
            {"ETUDE_PORT": "many"},
            78,
            "ETUDE_PORT: 'many' is not a valid port: use a number from 0 to 65535",
        ),
        ("node", {"ETUDE_ALLOW_WEAK_ISOLATION": "yes"}, 78, "ETUDE_ALLOW_WEAK_ISOLATION"),
        ("broker", {"ETUDE_PROBE_PORT": "99999"}, 78, "ETUDE_PROBE_PORT"),
        ("other", {}, 78, "usage: etude-envserver broker|node"),
    ],
)
def test_a_bad_setting_is_named_and_never_tried_again(
    processes: Processes, role: str, changes: dict[str, str], status: int, said: str
) -> None:
    processes.ports |= {"other": 1, "probe-other": 1}

    assert processes.start(role, changes).wait(60) == status
    assert said in processes.log(role)


def test_a_missing_setting_is_named(processes: Processes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude.envserver.main", "node"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (
        78,
        b"etude-envserver: ETUDE_BROKER_TARGET is not set\n",
    )


@pytest.mark.parametrize(
    ("minimum", "trust", "allow", "said"),
    [
        ("MicroVM", "Trusted", "1", "names no image for a microVM"),
        ("Sandbox", "Trusted", "1", "names no image for a microVM"),
        ("Process", "Untrusted", "0", "template 'python' is Untrusted"),
    ],
)
def test_a_host_refuses_what_its_wall_is_too_weak_for(
    processes: Processes, minimum: str, trust: str, allow: str, said: str
) -> None:
    processes.write_pool(minimum, trust)

    assert processes.start("node", {"ETUDE_ALLOW_WEAK_ISOLATION": allow}).wait(60) == 78
    assert said in processes.log("node")
    assert "fix: " in processes.log("node")


def test_a_port_in_use_is_named(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", processes.ports["broker"])):
        assert processes.start("broker").wait(60) == 1

    assert f"127.0.0.1:{processes.ports['broker']}" in processes.log("broker")
