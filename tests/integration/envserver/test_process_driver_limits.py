"""What a command can not use up in the process driver."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.isolation import sandbox_layout
from etude.envserver.isolation.output import HEAD_BYTES, TAIL_BYTES
from etude.envserver.isolation.sandbox_layout import CommandLimits

MakeWorkspace = Callable[..., Path]


async def run(
    driver: ProcessDriver, workspace: Path, command: str, timeout_s: float = 20
) -> CommandOutcome:
    return await driver.run(
        FolderCommand(command=command, workspace=workspace, timeout_s=timeout_s)
    )


async def script(
    driver: ProcessDriver, workspace: Path, code: str, timeout_s: float = 20
) -> CommandOutcome:
    (workspace / "x.py").write_text(code)
    return await run(driver, workspace, "python3 x.py", timeout_s)


async def still_works(driver: ProcessDriver, make_workspace: MakeWorkspace) -> bool:
    neighbour = make_workspace(driver, "neighbour", {})
    return (await run(driver, neighbour, "echo well")).output == b"well\n"


async def test_an_endless_command_is_ended_on_time(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, "echo begun; sleep 1000", timeout_s=0.3)

    assert (outcome.output, outcome.timed_out, outcome.exit_code) == (b"begun\n", True, 143)


async def test_a_command_that_ignores_the_request_to_end_is_killed(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, "trap '' TERM; while true; do :; done", timeout_s=0.3)

    assert (outcome.timed_out, outcome.exit_code) == (True, 137)


@pytest.mark.parametrize("name", ["pytest -q", "python3 tests/test_repo.py"])
async def test_a_warm_run_that_hangs_is_ended_too(
    driver: ProcessDriver, make_workspace: MakeWorkspace, name: str
) -> None:
    test = b"while True:\n try:\n  while True: pass\n except BaseException: pass\n"
    workspace = make_workspace(driver, "a", {"tests/test_repo.py": test})

    outcome = await run(driver, workspace, name, timeout_s=0.3)

    assert outcome.timed_out


async def test_endless_output_stays_small(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, "yes", timeout_s=20)

    assert outcome.ended_for in {"output", "time"}
    assert len(outcome.output) == HEAD_BYTES + TAIL_BYTES
    assert outcome.dropped_bytes > sandbox_layout.FLOOD_BYTES - (1 << 20)


async def test_a_fork_bomb_ends_with_its_command_and_stays_in_its_lease(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, "bomb() { bomb | bomb & }; bomb; sleep 1", timeout_s=3)

    assert b"fork" in outcome.output
    assert await still_works(driver, make_workspace)


async def test_processes_are_counted_per_command(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    code = (
        "import os, time\nn = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0:\n            time.sleep(30); os._exit(0)\n"
        "        n += 1\n"
        "except BlockingIOError:\n    print(n)\n"
    )
    workspace = make_workspace(driver, "a", {})

    outcome = await script(driver, workspace, code)

    assert int(outcome.output) == sandbox_layout.PROCESSES - 1


async def test_one_process_cannot_take_all_memory(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await script(driver, workspace, "x = bytearray(2 << 30)")

    assert outcome.output.endswith(b"MemoryError\n")


@pytest.mark.parametrize("noise", ["", "while True: print('busy', flush=True)\n"])
async def test_many_processes_together_cannot_take_all_memory(
    driver: ProcessDriver, make_workspace: MakeWorkspace, noise: str
) -> None:
    code = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = b'x' * (500 << 20); time.sleep(30); os._exit(0)\n"
        f"{noise}time.sleep(30)\n"
    )
    workspace = make_workspace(driver, "a", {})

    outcome = await script(driver, workspace, code, timeout_s=30)

    assert outcome.ended_for == "memory"
    assert await still_works(driver, make_workspace)


async def test_private_folders_are_small(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(
        driver,
        workspace,
        "for d in /tmp /logs /dev/shm; do head -c 99000000 /dev/zero > $d/x; stat -c %s $d/x; done;"
        "head -c 99000000 /dev/zero > big; stat -c %s big",
    )

    sizes = [int(line) for line in outcome.output.splitlines() if line.isdigit()]
    full = sandbox_layout.TEMPORARY_BYTES
    assert sizes == [full, full // 4, full // 4, sandbox_layout.FILE_BYTES]


async def test_the_limits_of_a_slot_hold_for_commands_and_programs(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    mib = 1 << 20
    driver.limits = CommandLimits(
        memory_bytes=2048 * mib,
        address_bytes=8192 * mib,
        processes=100,
        open_files=700,
        file_bytes=5 * mib,
        temporary_bytes=40 * mib,
    )
    code = (
        "import os, resource as r\n"
        "for name in ('AS', 'NPROC', 'NOFILE', 'FSIZE'):\n"
        "    print(r.getrlimit(getattr(r, 'RLIMIT_' + name))[1])\n"
        "found = os.statvfs('/tmp')\nprint(found.f_blocks * found.f_frsize)\n"
    )
    workspace = make_workspace(driver, "a", {"show.py": code.encode()})

    outcome = await run(driver, workspace, "sh -c 'python3 show.py'")

    shown = [int(line) for line in outcome.output.split()]
    assert shown == [8192 * mib, 100, 700, 5 * mib, 40 * mib]


async def test_a_process_left_behind_ends_with_its_command(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(
        driver,
        workspace,
        "setsid sh -c 'trap \"\" TERM HUP; while true; do echo x >> grows; sleep 0.01; done' & "
        "while [ ! -s grows ]; do sleep 0.01; done; wc -c < grows",
    )
    size = (workspace / "grows").stat().st_size
    await run(driver, workspace, "sleep 0.1")

    assert outcome.exit_code == 0
    assert (workspace / "grows").stat().st_size == size


@pytest.mark.parametrize("text", ["x" * 200_000, "\x01" * 60_000])
async def test_a_command_too_long_for_any_program_is_refused_in_words(
    driver: ProcessDriver, make_workspace: MakeWorkspace, text: str
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, "true " + text)

    assert (outcome.output, outcome.exit_code) == (b"sh: argument list too long\n", 126)


@pytest.mark.parametrize("text", ["\u6f22" * 43_000, "\U0001f600" * 32_000, "\\'" * 32_000])
async def test_a_long_command_in_any_script_runs(
    driver: ProcessDriver, make_workspace: MakeWorkspace, text: str
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, f"# {text}\necho done")

    assert (outcome.output, outcome.exit_code) == (b"done\n", 0)


async def test_fifty_commands_leave_nothing_behind(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})
    await run(driver, workspace, "true")
    before = await asyncio.to_thread(held)

    for _ in range(50):
        await run(driver, workspace, "true")

    assert await asyncio.to_thread(held) == before


def held() -> tuple[int, int]:
    """Open files and mounts of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/mounts").read_text().count("\n")
