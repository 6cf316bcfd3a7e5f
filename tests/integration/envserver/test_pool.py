"""A pool as its clients see it: leases, turns, diffs, grades, over real gRPC and real walls."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from etude.common.harbor.task import REWARD_PATH
from etude.v1 import environments_pb2

Pool = Any  # the fixture's class lives in conftest, which test modules cannot import

FIX = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
VERIFIER = (
    "import pathlib, sys\n"
    "sys.path.insert(0, '/workspace')\n"
    "from shop.core import add\n"
    "folder = pathlib.Path('/logs/verifier')\n"
    "folder.mkdir(parents=True)\n"
    "(folder / 'reward.txt').write_text('1' if add(2, 2) == 4 else '0')\n"
)


def job(
    diff: environments_pb2.WorkspaceDiff | None = None, verifier: str = VERIFIER, **fields: Any
) -> environments_pb2.GradeJob:
    made = environments_pb2.GradeJob(
        diff=diff or environments_pb2.WorkspaceDiff(),
        files=[environments_pb2.WorkspaceFile(path="verify.py", content=verifier.encode())],
        command="python3 /tests/verify.py",
        timeout_seconds=20,
        reward_path=REWARD_PATH,
    )
    for name, value in fields.items():
        if name == "artefacts":
            made.artefacts.extend(value)
        else:
            setattr(made, name, value)
    return made


def written(**files: str) -> environments_pb2.WorkspaceDiff:
    return environments_pb2.WorkspaceDiff(
        written=[
            environments_pb2.WorkspaceFile(path=path, content=text.encode())
            for path, text in files.items()
        ]
    )


async def test_a_rollout_from_its_lease_to_its_reward(pool: Pool) -> None:
    (lease,) = await pool.launch("rollout")
    test = ("run_terminal", {"command": "pytest -q"})

    assert await pool.turn(lease, ("1", *test)) == ["FAILED test_add\n1 failed"]
    assert await pool.turn(lease, ("2", "search_replace", FIX), ("3", *test)) == ["ok", "1 passed"]
    diff = await pool.diff(lease)
    await pool.broker.ReleaseLeases(
        environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
    )

    (grading,) = await pool.launch("grading")
    response = await pool.grade(grading, job(diff))
    assert (response.reward_file, response.exit_code, response.timed_out) == (b"1", 0, False)
    assert (await pool.grade(grading, job())).reward_file == b"0"


async def test_a_lease_states_its_wall(pool: Pool) -> None:
    (lease,) = await pool.launch("a")

    assert (lease.driver, lease.isolation) == ("process", environments_pb2.ISOLATION_WEAK)


async def test_files_that_tools_wrote_belong_to_the_commands(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    calls = (
        ("1", "search_replace", FIX),
        ("2", "run_terminal", {"command": "echo '# more' >> shop/core.py && tail -1 shop/core.py"}),
    )

    assert await pool.turn(lease, *calls) == ["ok", "# more"]


async def test_the_agent_sees_no_hidden_test_and_no_grader_sees_the_agents_leftovers(
    pool: Pool,
) -> None:
    (lease,) = await pool.launch("a")
    leave = "echo x > /tmp/left; echo x > /logs/left; mkdir -p d && echo x > d/left; ls /tests"
    assert await pool.turn(lease, ("1", "run_terminal", {"command": leave})) == ["(no output)"]

    look = "import os\nprint(*(sorted(os.listdir(d)) for d in ('/tmp', '/logs', '/workspace')))\n"
    response = await pool.grade(lease, job(verifier=look))

    assert response.output == b"[] [] ['shop', 'tests']\n"
    assert not response.HasField("reward_file")


async def test_the_agents_token_cannot_diff_or_grade(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    lease.control_token = lease.agent_token

    for attempt in (pool.diff(lease), pool.grade(lease, job())):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attempt
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_grade_says_how_it_came_about_and_no_fork_is_graded_without_services(
    pool: Pool,
) -> None:
    (lease,) = await pool.launch("a")
    graded = await pool.grade(lease, job())
    assert graded.evidence == environments_pb2.GradeEvidence(
        mode=environments_pb2.GRADE_MODE_CLEAN,
        driver="process",
        isolation=environments_pb2.ISOLATION_WEAK,
    )

    forked = job()
    forked.mode = environments_pb2.GRADE_MODE_FORK
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.grade(lease, forked)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "driver process has no cap 'memory'" in str(caught.value.details())


async def test_another_leases_token_opens_nothing(pool: Pool) -> None:
    one, other = await pool.launch("a", 2)
    one.agent_token = other.agent_token

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.turn(one, ("1", "list_dir", {"path": "."}))

    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_released_lease_is_not_found(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    await pool.broker.ReleaseLeases(
        environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
    )

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.turn(lease, ("1", "list_dir", {"path": "."}))

    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_hidden_test_that_hangs_is_told_from_one_that_fails(pool: Pool) -> None:
    (lease,) = await pool.launch("a")

    response = await pool.grade(lease, job(verifier="while True: pass\n", timeout_seconds=1))

    assert response.timed_out
    assert not response.HasField("reward_file")


@pytest.mark.parametrize(
    "plant", ["conftest.py", "sitecustomize.py", "pathlib.py", "tests/conftest.py", "verify.py"]
)
async def test_planted_files_change_no_grade(pool: Pool, plant: str) -> None:
    (lease,) = await pool.launch("a")
    lie = (
        "import os\nos.makedirs('/logs/verifier')\n"
        "open('/logs/verifier/reward.txt', 'w').write('1')\nos._exit(0)\n"
    )

    response = await pool.grade(lease, job(written(**{plant: lie})))

    assert response.reward_file == b"0"


async def test_only_artefacts_reach_the_grader(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    fixed = "def add(a, b):\n    return a + b\n"

    graded = await pool.grade(lease, job(written(**{"shop/core.py": fixed}), artefacts=["docs/**"]))

    assert graded.reward_file == b"0"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"diff": written(**{"../../etc/x": "x"})}, "diff.written"),
        ({"reward_path": "/etc/passwd"}, "reward_path"),
        ({"reward_path": "/logs/../etc/passwd"}, "reward_path"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"command": ""}, "command"),
    ],
)
async def test_a_bad_grade_names_its_field(pool: Pool, change: dict[str, Any], field: str) -> None:
    (lease,) = await pool.launch("a")
    made = job(change.pop("diff", None), **change)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.grade(lease, made)

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(caught.value) == [field]


async def test_chunks_that_are_no_job_are_refused(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    request = environments_pb2.GradeRequest(
        lease_id=lease.lease_id, control_token=lease.control_token, chunk=b"\xff\xff"
    )

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.node(lease).Grade(iter([request]))

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_diff_of_several_chunks_arrives_whole(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    make = "head -c 3000000 /dev/urandom > big && sha256sum < big"
    (shown,) = await pool.turn(lease, ("1", "run_terminal", {"command": make}))

    diff = await pool.diff(lease)
    response = await pool.grade(
        lease, job(diff, command="sha256sum < big; chmod 400 big; ls -l big")
    )

    assert response.output.decode().splitlines()[0] == shown


async def test_more_environments_than_slots_wait_for_their_turn(pool: Pool) -> None:
    first = await pool.launch("a", 4)
    waiting = asyncio.create_task(pool.launch("b", 2))
    watch = pool.watch.WatchPool(environments_pb2.WatchPoolRequest())
    async for report in watch:
        if report.waiting == 2:
            break
    assert (report.nodes, report.slots, report.leased, report.driver) == (1, 4, 4, "process")

    await pool.broker.ReleaseLeases(
        environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id for lease in first[:2]])
    )

    assert len(await waiting) == 2
    async for report in watch:
        if report.waiting == 0:
            break
    assert report.granted_total == 6
    watch.cancel()


async def test_a_full_queue_says_when_to_come_back(pool: Pool) -> None:
    waiting = [asyncio.create_task(pool.launch(f"w{n}", 1024)) for n in range(10)]
    watch = pool.watch.WatchPool(environments_pb2.WatchPoolRequest())
    async for report in watch:
        if report.waiting > 9_000:
            break

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.launch("late", 1024)

    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(caught.value, error_details_pb2.RetryInfo).retry_delay.seconds > 0
    for task in waiting:
        task.cancel()
    watch.cancel()


@pytest.mark.parametrize("command", ["\ud800", "\x00", "x" * 200_000, "", "\n", "'", "🙂"])
async def test_a_strange_command_is_an_answer(pool: Pool, command: str) -> None:
    (lease,) = await pool.launch("a")

    (said,) = await pool.turn(lease, ("1", "run_terminal", {"command": command}))

    assert isinstance(said, str)
    assert await pool.turn(lease, ("2", "run_terminal", {"command": "echo well"})) == ["well"]


async def test_tools_and_diffs_do_not_follow_paths_out_of_the_workspace(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("CANARY")
    (lease,) = await pool.launch("a")
    plant = f"ln -sf {tmp_path}/canary shop/core.py; ln -s {tmp_path} out; ln -s / root; ls"
    await pool.turn(lease, ("0", "run_terminal", {"command": plant}))

    paths = ("shop/core.py", "out/canary", f"root{tmp_path}/canary", f"{tmp_path}/canary")
    for number, path in enumerate((*paths, "../../../state.json", "../state.json"), 1):
        said = await pool.turn(
            lease,
            (f"r{number}", "read_file", {"path": path}),
            (f"w{number}", "search_replace", {"path": path, "old_string": "C", "new_string": "X"}),
        )
        assert said == ["Error: no such file"] * 2
    (found,) = await pool.turn(lease, ("g", "grep", {"pattern": "CANARY"}))
    assert found == "no match"
    diff = await pool.diff(lease)
    assert list(diff.deleted) == ["shop/core.py"]
    assert not diff.written
    assert (tmp_path / "canary").read_text() == "CANARY"


async def test_an_unknown_task_is_a_failure_with_its_reason(pool: Pool) -> None:
    pool.uri = "file:///nowhere/at/all"
    call = pool.broker.LaunchBatch(pool.request("a"), timeout=20)

    (outcome,) = [outcome async for outcome in call]

    assert outcome.failure.reason == "InvalidSpec"
    assert "/nowhere/at/all" in outcome.failure.message


def violations(error: grpc.aio.AioRpcError) -> list[str]:
    found = details(error, error_details_pb2.BadRequest)
    return [violation.field for violation in found.field_violations]


def details(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # typed for the other API
    assert status is not None
    for box in status.details:
        made = kind()
        if box.Unpack(made):
            return made
    raise AssertionError(f"no {kind.__name__} in {error}")
