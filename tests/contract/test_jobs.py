"""Background commands are alike wherever they run."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.agent.workspace import JobError, JobFault, Jobs, JobState
from etude.agent.workspace.jobs import INPUT_BYTES, LOG_BYTES, MAX_KNOWN, MAX_RUNNING
from etude.envserver.drivers.base import DriverUnavailableError, SandboxError
from etude.envserver.drivers.folder_jobs import FolderJobs
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.storage import folders

WAIT_S = 60.0


@contextlib.asynccontextmanager
async def _in_guest(kind: str, folder: Path) -> AsyncIterator[Jobs]:
    root = folder / "root"
    root.mkdir()
    async with guests.guest(kind, root) as guest:
        yield GuestJobs(channel=guest.channel)


@contextlib.asynccontextmanager
async def _behind_the_wall(folder: Path) -> AsyncIterator[FolderJobs]:
    driver = ProcessDriver(folder)
    try:
        await driver.start()
    except DriverUnavailableError as error:
        pytest.skip(str(error))
    lease = driver.leases / "one"
    folders.write_tree(lease, {}, folders.current_owner())
    folders.write_tree(lease / "workspace", {}, driver.owner())
    made = FolderJobs(lease / "jobs", partial(driver.launch, lease / "workspace"))
    try:
        yield made
    finally:
        await made.close()
        await driver.stop()


@pytest.fixture(params=[*guests.AGENTS, "process"])
async def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Jobs]:
    if request.param == "process":
        async with _behind_the_wall(tmp_path) as behind:
            yield behind
    else:
        async with _in_guest(request.param, tmp_path) as inside:
            yield inside


async def printed(jobs: Jobs, job: int) -> bytes:
    return await jobs.output(job, offset=0, size=LOG_BYTES)


def ended(state: JobState) -> tuple[int, int, str]:
    assert not state.is_running
    return state.exit_code, state.log_bytes, state.ended_for


async def faults(jobs: Jobs, job: int) -> set[JobFault]:
    found = set()
    for call in (
        jobs.state(job),
        jobs.output(job, offset=0, size=1),
        jobs.send(job, b"x", end=False),
        jobs.kill(job),
    ):
        with pytest.raises(JobError) as caught:
            await call
        found.add(caught.value.fault)
    return found


async def test_a_job_prints_both_streams_in_order_and_tells_how_it_ended(jobs: Jobs) -> None:
    job = await jobs.start("echo one; echo two >&2; echo three; exit 4", timeout_s=None)
    assert job == 1
    assert ended(await jobs.state(job, wait_s=WAIT_S)) == (4, 14, "")
    assert await printed(jobs, job) == b"one\ntwo\nthree\n"
    assert await jobs.output(job, offset=4, size=3) == b"two"
    assert await jobs.output(job, offset=14, size=9) == b""


async def test_a_job_runs_until_it_gets_what_it_waits_for(jobs: Jobs) -> None:
    job = await jobs.start('read line; echo "got $line"; cat', timeout_s=None)
    assert jobs.may_run
    assert (await jobs.state(job)).is_running
    await jobs.send(job, b"first\n", end=False)
    await jobs.send(job, b"rest", end=True)
    assert ended(await jobs.state(job, wait_s=WAIT_S)) == (0, 14, "")
    assert await printed(jobs, job) == b"got first\nrest"
    assert not jobs.may_run
    with pytest.raises(JobError) as caught:
        await jobs.send(job, b"more", end=False)
    assert caught.value.fault is JobFault.NO_INPUT


async def test_input_that_is_not_read_is_refused_in_whole(jobs: Jobs) -> None:
    job = await jobs.start("sleep 300", timeout_s=None)

    async def fill() -> None:
        for _ in range(20):
            await jobs.send(job, bytes(INPUT_BYTES), end=False)

    with pytest.raises(JobError) as caught:
        await fill()
    assert caught.value.fault is JobFault.NOT_READING
    await jobs.kill(job)


async def test_a_killed_job_ends_with_all_that_it_has_started(jobs: Jobs) -> None:
    job = await jobs.start("sleep 300 & sleep 300; echo no", timeout_s=None)
    await jobs.kill(job)
    assert ended(await jobs.state(job)) == (128 + 15, 0, "")
    await jobs.kill(job)  # again, without effect


async def test_a_job_that_does_not_listen_is_killed_after_a_grace(jobs: Jobs) -> None:
    job = await jobs.start("trap '' TERM; echo up; while :; do sleep 0.2; done", timeout_s=None)
    while not (await jobs.state(job)).log_bytes:
        await jobs.state(job, wait_s=0.1)
    await jobs.kill(job)
    assert ended(await jobs.state(job, wait_s=WAIT_S)) == (128 + 9, 3, "")


async def test_a_job_that_takes_too_long_is_ended(jobs: Jobs) -> None:
    job = await jobs.start("echo up; exec sleep 300", timeout_s=1)
    assert ended(await jobs.state(job, wait_s=WAIT_S)) == (128 + 15, 3, "time")


async def test_a_job_that_floods_its_log_is_ended(jobs: Jobs) -> None:
    job = await jobs.start("exec cat /dev/zero", timeout_s=None)
    state = await jobs.state(job, wait_s=WAIT_S)
    # The limit on the size of a file may come first, by a signal of its own.
    assert (state.is_running, state.log_bytes, state.ended_for) == (False, LOG_BYTES, "output")
    assert await jobs.output(job, offset=LOG_BYTES - 1, size=1) == b"\0"


async def test_jobs_are_bounded_in_number_and_old_ones_forgotten(jobs: Jobs) -> None:
    running = [await jobs.start("sleep 300", timeout_s=None) for _ in range(MAX_RUNNING)]
    with pytest.raises(JobError) as caught:
        await jobs.start("true", timeout_s=None)
    assert caught.value.fault is JobFault.TOO_MANY
    await jobs.kill(running[1])
    for number in range(MAX_RUNNING + 1, MAX_KNOWN + 2):
        job = await jobs.start("true", timeout_s=None)
        assert job == number
        assert ended(await jobs.state(job, wait_s=WAIT_S)) == (0, 0, "")
    assert await faults(jobs, running[1]) == {JobFault.NO_SUCH_JOB}
    assert (await jobs.state(running[0])).is_running


async def test_a_job_that_never_was_is_told_by_its_number(jobs: Jobs) -> None:
    assert await faults(jobs, 7) == {JobFault.NO_SUCH_JOB}
    with pytest.raises(JobError, match="job 7: there is no such job"):
        await jobs.state(7)


async def test_jobs_of_a_folder_are_known_to_a_successor(tmp_path: Path) -> None:
    async with _behind_the_wall(tmp_path) as made:
        done = await made.start("echo hello; exit 3", timeout_s=None)
        assert ended(await made.state(done, wait_s=WAIT_S)) == (3, 6, "")
        cut_off = await made.start("echo up; sleep 300", timeout_s=None)
        while not (await made.state(cut_off)).log_bytes:
            await made.state(cut_off, wait_s=0.1)
        successor = FolderJobs(made.folder, made.launch)
        assert ended(await successor.state(done)) == (3, 6, "")
        assert await printed(successor, done) == b"hello\n"
        assert not successor.is_intact
        with pytest.raises(SandboxError, match="was running when the host process ended"):
            await successor.state(cut_off)
        successor.end_lost()
        assert ended(await successor.state(cut_off)) == (128 + 9, 3, "")
        assert FolderJobs(made.folder, made.launch).is_intact
        assert await successor.start("true", timeout_s=None) == cut_off + 1
        await successor.close()


@pytest.mark.parametrize("agent", guests.AGENTS)
async def test_the_controllers_jobs_are_numbered_apart_and_out_of_the_policys_reach(
    agent: str, tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir()
    async with guests.guest(agent, tmp_path / "root") as guest:
        policys = GuestJobs(channel=guest.channel)
        controllers = GuestJobs(channel=guest.channel, is_controllers=True)
        graded = [await controllers.start("sleep 600", timeout_s=None) for _ in range(MAX_RUNNING)]

        started = [await policys.start("sleep 600", timeout_s=None) for _ in range(MAX_RUNNING)]

        assert started == list(range(1, MAX_RUNNING + 1))
        for number in graded:
            for refused in (
                policys.state(number),
                policys.kill(number),
                policys.output(number, offset=0, size=9),
                policys.send(number, b"", end=True),
            ):
                with pytest.raises(JobError, match="there is no such job"):
                    await refused
            assert (await controllers.state(number)).is_running
        with pytest.raises(JobError):
            await controllers.kill(started[0])
        for number in graded:
            await controllers.kill(number)
        assert (await policys.state(started[0])).is_running
