"""Commands, jobs and sessions inside of either agent."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.agent.workspace import ExecResult
from etude.agent.workspace.jobs import MAX_RUNNING
from etude.envserver.guest.calls import GuestReply, GuestRequest
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.isolation.output import HEAD_BYTES, TAIL_BYTES
from etude.envserver.isolation.sandbox_layout import ENVIRONMENT
from etude.v1 import guest_pb2

LONG_S = 300
"""A command that would outlast the test's own limit, were it not ended."""


@pytest.fixture(params=guests.AGENTS)
async def channel(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GuestChannel]:
    root = tmp_path / "root"
    root.mkdir()
    async with guests.guest(request.param, root) as guest:
        yield guest.channel


@pytest.fixture
def commands(channel: GuestChannel) -> GuestCommands:
    return GuestCommands(channel=channel, limits=guest_pb2.GuestLimits())


async def ask(channel: GuestChannel, data: bytes | None = None, **what: object) -> GuestReply:
    operation = guest_pb2.GuestCall(**what)  # type: ignore[arg-type] # one operation
    return await channel.call(GuestRequest(operation=operation, data=data, deadline_s=60))


def execute(line: bytes, **given: object) -> guest_pb2.GuestExec:
    return guest_pb2.GuestExec(
        shell=line,
        env=dict(ENVIRONMENT),
        head_bytes=1000,
        tail_bytes=1000,
        **given,  # type: ignore[arg-type] # fields by name
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it was reaped between the two looks
        return False
    return state not in "ZX"


async def ended(pid: int) -> None:
    await guests.until(lambda: not is_alive(pid))


async def test_output_and_exit_code_are_the_shells(commands: GuestCommands) -> None:
    done = await commands.run("echo out; echo err >&2; exit 3", timeout_s=60)
    assert done == ExecResult(output=b"out\nerr\n", exit_code=3, cpu_ms=done.cpu_ms)
    done = await commands.run("kill -9 $$", timeout_s=60)
    assert (done.exit_code, done.ended_for) == (137, "")


async def test_a_command_begins_in_the_workspace_with_its_environment_only(
    commands: GuestCommands, tmp_path: Path
) -> None:
    done = await commands.run("pwd; env | sort | grep -v -e ^PWD -e ^_ -e ^OLDPWD -e ^SHLVL", 60)
    lines = [f"{name}={value}" for name, value in sorted(ENVIRONMENT.items())]
    assert done.output.decode().splitlines() == [str(tmp_path / "root"), *lines]


async def test_nobody_reads_input_or_the_channel(commands: GuestCommands) -> None:
    done = await commands.run("cat; ls -l /proc/self/fd | wc -l", timeout_s=60)
    # total, 0, 1, 2 and the folder itself
    assert done.output == b"5\n"


async def test_of_a_long_output_both_ends_are_kept(commands: GuestCommands) -> None:
    done = await commands.run("seq 200000", timeout_s=60)
    whole = "".join(f"{n}\n" for n in range(1, 200_001)).encode()
    assert done.output == whole[:HEAD_BYTES] + whole[-TAIL_BYTES:]
    middle = whole[HEAD_BYTES:-TAIL_BYTES]
    assert (done.dropped_bytes, done.dropped_lines) == (len(middle), middle.count(b"\n"))


async def test_a_command_is_ended_when_its_time_is_over(commands: GuestCommands) -> None:
    done = await commands.run(f"echo begun; sleep {LONG_S}", timeout_s=0.5)
    assert (done.output, done.timed_out, done.ended_for) == (b"begun\n", True, "time")
    assert done.exit_code == 128 + signal.SIGTERM


async def test_one_that_will_not_end_is_killed(commands: GuestCommands) -> None:
    deaf = f"trap '' TERM; echo begun; while :; do sleep 0.1; done; sleep {LONG_S}"
    done = await commands.run(deaf, timeout_s=0.5)
    assert (done.exit_code, done.timed_out) == (128 + signal.SIGKILL, True)


async def test_a_flood_is_ended(channel: GuestChannel) -> None:
    limits = guest_pb2.GuestLimits(flood_bytes=1 << 20)
    done = await GuestCommands(channel=channel, limits=limits).run("yes", timeout_s=LONG_S)
    assert (done.ended_for, done.timed_out) == ("output", False)
    assert done.output.startswith(b"y\ny\n")
    assert done.dropped_bytes > 900_000


async def test_a_full_disk_ends_a_command(channel: GuestChannel) -> None:
    limits = guest_pb2.GuestLimits(min_free_bytes=1 << 62)
    slow = f"sleep {LONG_S}"
    done = await GuestCommands(channel=channel, limits=limits).run(slow, timeout_s=LONG_S)
    assert done.ended_for == "disk"


async def test_limits_are_set(channel: GuestChannel) -> None:
    limits = guest_pb2.GuestLimits(open_files=77, file_bytes=10 << 20, memory_bytes=1 << 30)
    commands = GuestCommands(channel=channel, limits=limits)
    line = "sleep 0.2; ulimit -n; ulimit -v; ulimit -c"
    assert (await commands.run(line, timeout_s=60)).output == b"77\n1048576\n0\n"


async def test_what_a_command_leaves_behind_is_ended(commands: GuestCommands) -> None:
    done = await commands.run(f"sleep {LONG_S} & echo $!", timeout_s=60)
    await ended(int(done.output))


async def test_a_process_in_a_session_of_its_own_is_ended_too(tmp_path: Path) -> None:
    async with guests.guest("go", tmp_path) as guest:
        commands = GuestCommands(channel=guest.channel, limits=guest_pb2.GuestLimits())
        line = f"setsid sh -c 'echo $$; exec sleep {LONG_S}' & sleep 0.3"
        done = await commands.run(line, timeout_s=60)
        await ended(int(done.output))


async def test_commands_run_beside_each_other(commands: GuestCommands) -> None:
    lines = [f"sleep 0.2; echo {n}" for n in range(20)]
    done = await asyncio.gather(*(commands.run(line, timeout_s=60) for line in lines))
    assert [each.output for each in done] == [f"{n}\n".encode() for n in range(20)]


async def test_a_command_above_the_kernels_limit_is_the_policys_fault(
    commands: GuestCommands,
) -> None:
    assert (await commands.run("true " + "x" * (128 << 10), timeout_s=60)).exit_code == 126
    long = "true " + "x" * (100 << 10) + "; echo done"
    assert (await commands.run(long, timeout_s=60)).output == b"done\n"


async def test_cancelling_the_caller_ends_the_command(
    commands: GuestCommands, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    task = asyncio.create_task(commands.run(f"echo $$ > {note}; sleep {LONG_S}", timeout_s=LONG_S))
    await guests.until(lambda: note.exists() and bool(note.read_text().strip()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended(int(note.read_text()))


async def test_a_command_may_have_input_and_two_outputs(channel: GuestChannel) -> None:
    given = b"line\n" * 100_000
    what = execute(b"wc -c; echo err >&2", has_input=True)
    reply = await ask(channel, data=given, exec=what)
    assert (reply.data[1].strip(), reply.data[2]) == (b"500000", b"err\n")


async def test_a_program_is_found_or_not(channel: GuestChannel) -> None:
    found = guest_pb2.GuestExec(
        argv=[b"printf", b"%s", b"a b"], env=dict(ENVIRONMENT), head_bytes=9
    )
    assert (await ask(channel, exec=found)).data[1] == b"a b"
    missing = guest_pb2.GuestExec(argv=[b"no-such-program"], env=dict(ENVIRONMENT))
    reply = await ask(channel, exec=missing)
    assert reply.result.status == guest_pb2.GUEST_STATUS_NOT_FOUND


async def test_a_signal_reaches_the_process_group(channel: GuestChannel) -> None:
    what = guest_pb2.GuestCall(
        exec=execute(b"trap 'echo got it; exit 0' USR1; echo up; sleep 300 & wait")
    )
    request = GuestRequest(operation=what, deadline_s=60)
    task = asyncio.create_task(channel.call(request))
    async with asyncio.timeout(60):
        while not task.done():
            channel.signal(request.call_id, signal.SIGUSR1)
            await asyncio.sleep(0.3)
    reply = await task
    # Before the trap is set, the signal ends the shell: the group was reached either way.
    assert b"got it" in reply.data[1] or reply.result.exec.signal == signal.SIGUSR1


async def job(channel: GuestChannel, number: int, what: int, **given: int) -> GuestReply:
    asked = guest_pb2.GuestJob(job=number, operation=what, **given)  # type: ignore[arg-type]
    return await ask(channel, job=asked)


async def test_a_job_goes_on_and_leaves_a_log(channel: GuestChannel) -> None:
    events: list[guest_pb2.GuestEvent] = []
    channel.on_event = events.append
    line = b"echo one; while [ ! -e go ]; do sleep 0.05; done; echo two; exit 4"
    reply = await ask(channel, exec=execute(line, background=True))
    number = reply.result.exec.job
    assert reply.result.exec.is_running
    state = await channel.reset()
    assert list(state.jobs) == [number]
    operation = guest_pb2.GuestJobOperation
    await ask(channel, exec=execute(b"touch go"))
    reply = await job(channel, number, operation.GUEST_JOB_OPERATION_AWAIT)
    assert (reply.result.exec.exit_code, reply.result.exec.is_running) == (4, False)
    reply = await job(channel, number, operation.GUEST_JOB_OPERATION_READ, offset=4, limit=2)
    assert (reply.data[1], reply.result.exec.log_bytes) == (b"tw", 8)
    assert [event.job_exit.exit_code for event in events] == [4]


async def test_a_job_is_killed_with_its_children(channel: GuestChannel, tmp_path: Path) -> None:
    operation = guest_pb2.GuestJobOperation
    line = f"sleep {LONG_S} & echo $! > pid; wait".encode()
    number = (await ask(channel, exec=execute(line, background=True))).result.exec.job
    note = tmp_path / "root" / "pid"
    await guests.until(lambda: note.exists() and bool(note.read_text().strip()))
    reply = await job(channel, number, operation.GUEST_JOB_OPERATION_STATUS)
    assert reply.result.exec.is_running
    reply = await job(channel, number, operation.GUEST_JOB_OPERATION_KILL)
    assert reply.result.exec.signal == signal.SIGTERM
    await ended(int(note.read_text()))


async def test_jobs_are_bounded(channel: GuestChannel) -> None:
    lines = [execute(b"sleep 300", background=True) for _ in range(MAX_RUNNING + 6)]
    replies = [await ask(channel, exec=line) for line in lines]
    statuses = [reply.result.status for reply in replies]
    ok, busy = guest_pb2.GUEST_STATUS_OK, guest_pb2.GUEST_STATUS_BUSY
    assert statuses == [ok] * MAX_RUNNING + [busy] * 6
    missing = await job(channel, 1000, guest_pb2.GUEST_JOB_OPERATION_STATUS)
    assert missing.result.status == guest_pb2.GUEST_STATUS_NOT_FOUND


async def test_a_session_keeps_folder_and_variables(channel: GuestChannel) -> None:
    session = guest_pb2.GuestSession(name="s", env=dict(ENVIRONMENT))
    assert (await ask(channel, session=session)).result.status == guest_pb2.GUEST_STATUS_OK
    for line, output, code in (
        (b"cd /; x='a b'", b"", 0),
        (b'pwd; echo "$x"; false', b"/\na b\n", 1),
        (b"echo 'it''s'; echo err >&2; (exit 7)", b"its\nerr\n", 7),
        (b"seq 3 | while read n; do echo $n; done", b"1\n2\n3\n", 0),
        (b"no-such-thing 2>/dev/null", b"", 127),
    ):
        reply = await ask(channel, exec=execute(line, session="s"))
        assert (reply.data[1], reply.result.exec.exit_code) == (output, code)
    closed = guest_pb2.GuestSession(name="s", close=True)
    assert (await ask(channel, session=closed)).result.status == guest_pb2.GUEST_STATUS_OK
    reply = await ask(channel, exec=execute(b"true", session="s"))
    assert reply.result.status == guest_pb2.GUEST_STATUS_NOT_FOUND


@pytest.mark.parametrize(
    ("line", "timeout_ms", "code"),
    [(b"exit 5", 0, 5), (b"kill -9 $$", 0, 0), (b"sleep 300", 500, 0)],
)
async def test_a_session_ends_with_its_shell(
    channel: GuestChannel, line: bytes, timeout_ms: int, code: int
) -> None:
    await ask(channel, session=guest_pb2.GuestSession(name="s"))
    reply = await ask(channel, exec=execute(line, session="s", timeout_ms=timeout_ms))
    assert reply.result.status == guest_pb2.GUEST_STATUS_OK
    assert reply.result.exec.timed_out == (timeout_ms > 0)
    assert reply.result.exec.exit_code == code
    reply = await ask(channel, exec=execute(b"true", session="s"))
    assert reply.result.status == guest_pb2.GUEST_STATUS_NOT_FOUND


async def test_the_hosts_disk_is_not_frozen(channel: GuestChannel) -> None:
    for what in ({"freeze_fs": guest_pb2.GuestFreeze()}, {"thaw_fs": guest_pb2.GuestThaw()}):
        assert (await ask(channel, **what)).result.status == guest_pb2.GUEST_STATUS_DENIED
