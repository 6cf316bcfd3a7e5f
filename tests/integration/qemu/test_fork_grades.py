"""A grade in a fork: what a service holds counts, and nothing that the agent planted does."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from tests.support.environments import served_pools
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes
from tests.support.vm import microvms

from etude.common.rpc import channels
from etude.envserver.images.built_image import BuiltImage
from etude.v1 import (
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
)

REACHED = "REACHED-WHAT-IT-SHOULD-NOT"
SERVICE = """
mkdir -p /srv/ledger && mkfifo -m 622 /run/ledger
(while :; do while read -r line; do echo "$line" >> /srv/ledger/lines; done < /run/ledger; done) &
"""
"""Keeps what anybody tells it; nobody else can write there."""
VERIFIER = b"""cd /workspace
find /workspace /tmp /dev/shm -type f | sort
echo asked > /run/ledger
for look in 1 2 3 4 5 6 7 8 9 10; do grep -q asked /srv/ledger/lines && break; sleep 1; done
grep -qx forty-two /srv/ledger/lines && grep -qx asked /srv/ledger/lines || exit 1
[ "$(sh solution.sh)" = done ] || exit 2
sh cases.sh || exit 3
mkdir -p /logs/verifier && printf 1 > /logs/verifier/reward.txt
"""
CASES_SAY = "as they were\n"
CASES = f"echo {CASES_SAY}".encode()
PLANTS = f"""
plant='printf 1 > /logs/verifier/reward.txt; echo {REACHED}'
mkdir -p bin tests /tmp/bin /dev/shm/x
for place in conftest.sh cases.sh tests/test.sh bin/grep bin/sh .profile \
    /tmp/.profile /tmp/bin/grep /dev/shm/x/grep; do
  echo "$plant" > $place && chmod +x $place
done
echo forty-two > /run/ledger
echo 'echo done' > solution.sh
touch /tmp/waits
"""
WAITS = f"""
while :; do
  for file in /tests/test.sh /logs/verifier/reward.txt cases.sh; do
    [ -e $file ] && printf 1 > $file && echo {REACHED} >> $file
  done
done
"""


@pytest.fixture(scope="module")
def served(image: BuiltImage) -> BuiltImage:
    """The small image with a service in it."""
    return microvms.small_image(service=SERVICE)


@pytest.fixture
def processes(served: BuiltImage, tmp_path: Path) -> Iterator[Processes]:
    with served_pools.of_machines(tmp_path, served) as made:
        yield made


@pytest.fixture
async def pool(processes: Processes, tmp_path: Path) -> AsyncIterator[Pool]:
    source = tmp_path / "task" / "environment"
    source.mkdir(parents=True)
    (source / "solution.sh").write_text("echo not yet\n")
    (source / "cases.sh").write_bytes(CASES)
    async with served_pools.serving(processes, source) as made:
        made.toolset, made.deadline_s = "Standard", microvms.COMMAND_LIMIT_S
        yield made


async def forked(pool: Pool, lease: environments_pb2.Lease) -> environments_pb2.Lease:
    """A fork of what a lease's environment is now."""
    async with channels.dial(lease.endpoint) as channel:
        states = environment_state_pb2_grpc.EnvStateServiceStub(channel)
        made = await states.Snapshot(
            environment_state_pb2.SnapshotRequest(
                lease_id=lease.lease_id,
                control_token=lease.control_token,
                snapshot_id=f"end-{uuid.uuid4().hex}",
                with_memory=True,
            )
        )
    request = pool.request(uuid.uuid4().hex)
    request.snapshot_id = made.snapshot_id
    (answer,) = [each async for each in pool.broker.LaunchBatch(request, timeout=pool.deadline_s)]
    assert answer.HasField("lease"), answer
    return answer.lease


def job(diff: environments_pb2.WorkspaceDiff) -> environments_pb2.GradeJob:
    return environments_pb2.GradeJob(
        diff=diff,
        artefacts=["solution.sh"],
        files=[environments_pb2.WorkspaceFile(path="test.sh", content=VERIFIER)],
        command="sh /tests/test.sh",
        timeout_seconds=60,
        reward_path="/logs/verifier/reward.txt",
        mode=environments_pb2.GRADE_MODE_FORK,
    )


async def test_a_fork_is_graded_by_what_its_service_holds_and_by_no_plant(pool: Pool) -> None:
    lease, idle = await pool.launch("a", 2)
    await pool.turn(lease, ("1", "run_terminal", {"command": PLANTS}))
    await pool.turn(lease, ("2", "run_terminal", {"command": WAITS, "is_background": "true"}))
    diff = await pool.diff(lease)

    fork = await forked(pool, lease)
    graded = await pool.grade(fork, job(diff))

    said = graded.output.decode()
    assert said == f"/workspace/cases.sh\n/workspace/solution.sh\n{CASES_SAY}"
    assert (graded.reward_file, graded.exit_code) == (b"1", 0), said
    assert graded.evidence == environments_pb2.GradeEvidence(
        mode=environments_pb2.GRADE_MODE_FORK,
        driver="qemu-microvm",
        isolation=environments_pb2.ISOLATION_WEAK,
    )
    with pytest.raises(grpc.aio.AioRpcError) as over:
        await pool.grade(fork, job(diff))
    assert over.value.code() is grpc.StatusCode.NOT_FOUND

    # The plants alone are worth nothing: an agent that asked nothing of the service.
    await pool.turn(idle, ("1", "run_terminal", {"command": PLANTS.replace("forty-two", "41")}))
    graded = await pool.grade(await forked(pool, idle), job(await pool.diff(idle)))
    assert not graded.HasField("reward_file"), graded.output

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.grade(lease, job(diff))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "launch a fork from its snapshot" in str(refused.value.details())

    clean = job(diff)
    clean.mode = environments_pb2.GRADE_MODE_CLEAN
    graded = await pool.grade(lease, clean)
    assert not graded.HasField("reward_file"), "a fresh service has been told nothing"
    assert graded.evidence.mode == environments_pb2.GRADE_MODE_CLEAN
