"""A task's set-up over the wire: once for all siblings, which start equal and are graded on it."""

import grpc
import pytest
from tests.support.environments.pool_client import DEADLINE_S, Pool

from etude.trainer.rollouts.snapshot_client import fork_request
from etude.v1 import environments_pb2
from etude.v1.environment_state_pb2 import (
    DropSnapshotsRequest,
    SetUpRequest,
    SetUpResponse,
    SnapshotRequest,
    SnapshotResponse,
)

SETUP = "mkdir -p built && od -An -N16 -tx1 /dev/urandom > built/library && echo ready > notes.txt"
GRADE = (
    "set -e; cat built/library; grep -q ready notes.txt; test -e answer.txt;"
    " mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
)
LIBRARY = ("read_file", {"path": "built/library"})
ANSWER = ("run_terminal", {"command": "printf 42 > answer.txt"})


async def set_up(pool: Pool, lease: environments_pb2.Lease, *commands: str) -> SetUpResponse:
    request = SetUpRequest(
        lease_id=lease.lease_id,
        control_token=lease.control_token,
        commands=commands,
        timeout_seconds=20,
    )
    return await pool.states(lease).SetUp(request, timeout=DEADLINE_S)


async def saved(pool: Pool, lease: environments_pb2.Lease, name: str) -> SnapshotResponse:
    request = SnapshotRequest(
        lease_id=lease.lease_id,
        control_token=lease.control_token,
        snapshot_id=name,
        ttl_seconds=600,
    )
    return await pool.states(lease).Snapshot(request, timeout=DEADLINE_S)


async def forked(pool: Pool, name: str, count: int) -> list[environments_pb2.Lease]:
    request = fork_request(pool.request(f"of-{name}"), name, count=count)
    call = pool.broker.LaunchBatch(request, timeout=DEADLINE_S)
    outcomes = [outcome async for outcome in call]
    assert all(outcome.HasField("lease") for outcome in outcomes), outcomes
    return [outcome.lease for outcome in outcomes]


async def release(pool: Pool, *leases: environments_pb2.Lease) -> None:
    request = environments_pb2.ReleaseLeasesRequest(lease_ids=[each.lease_id for each in leases])
    await pool.broker.ReleaseLeases(request, timeout=DEADLINE_S)


def job(**fields: object) -> environments_pb2.GradeJob:
    return environments_pb2.GradeJob(
        command=GRADE,
        timeout_seconds=20,
        reward_path="/logs/verifier/reward.txt",
        **fields,  # type: ignore[arg-type]
    )


async def test_forks_of_what_a_set_up_left_start_equal_and_go_separate_ways(pool: Pool) -> None:
    (first,) = await pool.launch("first")
    assert (await set_up(pool, first, SETUP)).succeeded == 1
    made = await saved(pool, first, "start")
    await release(pool, first)

    siblings = await forked(pool, "start", 4)

    changes = [await pool.diff(each) for each in siblings]
    assert all(each == changes[0] for each in changes)
    assert changes[0] == environments_pb2.WorkspaceDiff()
    assert len({each.control_token for each in siblings} | {first.control_token}) == 5
    again = [await saved(pool, each, f"of-{number}") for number, each in enumerate(siblings)]
    assert {each.digest for each in again} == {made.digest}
    await pool.turn(siblings[0], ("1", *ANSWER))
    assert [file.path for file in (await pool.diff(siblings[0])).written] == ["answer.txt"]
    assert await pool.diff(siblings[1]) == changes[0]
    libraries = [await pool.turn(each, ("2", *LIBRARY)) for each in siblings]
    assert all(each == libraries[0] for each in libraries)


async def test_a_change_of_what_the_set_up_left_is_the_agents(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    await set_up(pool, lease, SETUP, "echo one > one.txt; rm shop/core.py")
    await pool.turn(lease, ("1", "run_terminal", {"command": "rm notes.txt; echo 2 > one.txt"}))
    changed = await pool.diff(lease)
    assert [(file.path, file.content) for file in changed.written] == [("one.txt", b"2\n")]
    assert list(changed.deleted) == ["notes.txt"]


async def test_a_set_up_that_leaves_more_than_an_agent_may_change_has_failed(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    done = await set_up(pool, lease, "mkdir many && cd many && seq 20001 | xargs touch")
    assert done.succeeded == 0
    assert done.output.startswith(b"the set-up leaves more than an agent may change")


async def test_hidden_tests_run_on_what_the_set_up_left_and_the_agents_changes(pool: Pool) -> None:
    (first,) = await pool.launch("first")
    await set_up(pool, first, SETUP)
    await saved(pool, first, "start")
    (agents,) = await forked(pool, "start", 1)
    await pool.turn(agents, ("1", *ANSWER))
    (library,) = await pool.turn(agents, ("2", *LIBRARY))
    handed = environments_pb2.WorkspaceDiff(
        written=[environments_pb2.WorkspaceFile(path="answer.txt", content=b"42")]
    )
    await release(pool, first)

    request = fork_request(pool.request("for-grades"), "start", count=2)
    one, other = [each.lease async for each in pool.broker.LaunchBatch(request, timeout=DEADLINE_S)]
    graded = await pool.grade(one, job(diff=handed))
    lacking = await pool.grade(other, job(diff=handed, artefacts=["docs/**"]))

    assert graded.reward_file == b"1\n"
    assert graded.evidence.mode == environments_pb2.GRADE_MODE_CLEAN
    assert graded.output.decode().split()[0] in library
    assert not lacking.HasField("reward_file")


async def test_a_lease_in_which_an_agent_has_run_is_no_clean_place_for_hidden_tests(
    pool: Pool,
) -> None:
    (lease,) = await pool.launch("a")
    await set_up(pool, lease, SETUP)
    await pool.turn(lease, ("1", *ANSWER))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.grade(lease, job())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    await saved(pool, lease, "used")
    (fork,) = await forked(pool, "used", 1)
    answer = await pool.grade(fork, job())
    assert not answer.HasField("reward_file")  # as in any lease: on the first files


async def test_a_command_that_fails_ends_the_set_up_and_the_lease(pool: Pool) -> None:
    (lease,) = await pool.launch("a")

    done = await set_up(pool, lease, "true", "echo no compiler; exit 7", "touch never")

    assert (done.succeeded, done.exit_code, done.timed_out) == (1, 7, False)
    assert done.output == b"no compiler\n"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.turn(lease, ("1", *ANSWER))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_lease_is_set_up_once_and_before_it_is_used(pool: Pool) -> None:
    one, other = await pool.launch("a", 2)
    await set_up(pool, one, "true")
    await pool.turn(other, ("1", *ANSWER))
    for lease in (one, other):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await set_up(pool, lease, "true")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("commands", "field"), [([], "commands"), (["x"] * 65, "commands"), (["a", ""], "commands[1]")]
)
async def test_a_set_up_that_is_none_is_refused_by_its_field(
    pool: Pool, commands: list[str], field: str
) -> None:
    (lease,) = await pool.launch("a")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await set_up(pool, lease, *commands)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith(field)


async def test_the_holder_of_an_ended_lease_drops_what_it_has_saved(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    await saved(pool, lease, "start")
    await release(pool, lease)
    request = DropSnapshotsRequest(
        lease_id=lease.lease_id, control_token=lease.agent_token, snapshot_ids=["start", "never"]
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.states(lease).DropSnapshots(request, timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

    request.control_token = lease.control_token
    answer = await pool.states(lease).DropSnapshots(request, timeout=DEADLINE_S)
    assert list(answer.missing_snapshot_ids) == ["never"]
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await pool.states(lease).DropSnapshots(request, timeout=DEADLINE_S)
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND
