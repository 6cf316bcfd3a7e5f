"""What a command sees, returns and leaves in the process driver."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.envserver.drivers.base import CommandOutcome, SandboxError
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process.driver import ProcessDriver

MakeWorkspace = Callable[..., Path]

REPOSITORY = {
    "shop/core.py": b"def add(a, b):\n    return a - b\n",
    "tests/test_repo.py": b"from shop.core import add\ndef test_add():\n    assert add(1, 2) == 3",
}


async def run(
    driver: ProcessDriver, workspace: Path, command: str, timeout_s: float = 20
) -> CommandOutcome:
    return await driver.run(
        FolderCommand(command=command, workspace=workspace, timeout_s=timeout_s)
    )


@pytest.mark.smoke
async def test_the_tests_of_a_repository_run_in_the_warm_interpreter(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", REPOSITORY)

    outcome = await run(driver, workspace, "pytest -q")

    assert (outcome.output, outcome.exit_code) == (b"FAILED test_add\n1 failed\n", 1)


@pytest.mark.parametrize("command", ["cd . && pytest -q", "pytest; true"])
async def test_through_the_shell_the_same_runner_answers(
    driver: ProcessDriver, make_workspace: MakeWorkspace, command: str
) -> None:
    workspace = make_workspace(driver, "a", REPOSITORY)

    outcome = await run(driver, workspace, command)

    assert outcome.output == b"FAILED test_add\n1 failed\n"


async def test_a_python_file_behaves_as_it_does_in_a_fresh_interpreter(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    script = (
        b"import atexit, json, sys, threading, time\n"
        b"atexit.register(print, 'at exit')\n"
        b"threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        b"print(__name__, __file__, sys.argv, sys.path[0])\n"
        b"print(hash('a'), sorted(vars()))\n"
        b"sys.exit(7)\n"
    )
    workspace = make_workspace(driver, "a", {"sub/x.py": script, "helper.py": b""})

    warm = await run(driver, workspace, "python3 sub/x.py")
    cold = await run(driver, workspace, "exec python3 sub/x.py")

    assert warm.exit_code == cold.exit_code == 7
    assert warm.output == cold.output


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [(b"raise ValueError(3)", 1), (b"import sys; sys.exit('words')", 1), (b"x = (", 1), (b"", 0)],
)
async def test_a_python_file_fails_as_it_does_in_a_fresh_interpreter(
    driver: ProcessDriver, make_workspace: MakeWorkspace, script: bytes, exit_code: int
) -> None:
    workspace = make_workspace(driver, "a", {"x.py": script})

    warm = await run(driver, workspace, "python3 x.py")
    cold = await run(driver, workspace, "exec python3 x.py")

    assert warm.exit_code == cold.exit_code == exit_code
    assert warm.output.splitlines()[-1:] == cold.output.splitlines()[-1:]


async def test_a_missing_python_file_is_named(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, "python3 no.py")

    assert outcome.exit_code == 2
    assert b"can't open file '/workspace/no.py': [Errno 2]" in outcome.output


async def test_a_command_changes_its_workspace_and_nothing_else(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {"a.txt": b"1\n"})

    outcome = await run(
        driver, workspace, "echo 2 >> a.txt; echo x > /tmp/x; mkdir d; touch d/e; cat a.txt"
    )

    assert outcome.output == b"1\n2\n"
    assert (workspace / "a.txt").read_bytes() == b"1\n2\n"
    assert (workspace / "d/e").exists()
    assert (await run(driver, workspace, "ls /tmp")).output == b""


async def test_hidden_tests_and_the_reward_file_come_and_go_with_one_command(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", REPOSITORY)
    tests = make_workspace(
        driver, "g", {"verify.py": b"import pathlib\npathlib.Path('/logs/r').write_text('1')\n"}
    )

    outcome = await driver.run(
        FolderCommand(
            command="python3 /tests/verify.py",
            workspace=workspace,
            tests=tests,
            timeout_s=20,
            collect="/logs/r",
        )
    )

    assert (outcome.exit_code, outcome.collected) == (0, b"1")
    assert (await run(driver, workspace, "ls /tests /logs")).output == b"/logs:\n\n/tests:\n"


@pytest.mark.parametrize(
    "make",
    [
        "ln -s /etc/passwd /logs/r",
        "mkdir /logs/r",
        "mkfifo /logs/r",
        "head -c 70000 /dev/zero > /logs/r",
        "true",
        "rmdir /logs/d; ln -s /etc /logs/d",
    ],
)
async def test_a_reward_file_that_is_no_small_regular_file_is_no_reward(
    driver: ProcessDriver, make_workspace: MakeWorkspace, make: str
) -> None:
    workspace = make_workspace(driver, "a", {})
    path = "/logs/d/passwd" if "/logs/d" in make else "/logs/r"

    outcome = await driver.run(
        FolderCommand(command=make, workspace=workspace, timeout_s=20, collect=path)
    )

    assert outcome.collected is None


async def test_a_long_output_keeps_its_beginning_and_its_end(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await driver.run(
        FolderCommand(
            command="seq 100000", workspace=workspace, timeout_s=20, head_bytes=6, tail_bytes=7
        )
    )

    assert outcome.output == b"1\n2\n3\n" + b"100000\n"
    total = sum(len(str(n)) + 1 for n in range(1, 100_001))
    assert (outcome.dropped_bytes, outcome.dropped_lines) == (total - 13, 100_000 - 4)


async def test_a_signal_that_ends_a_command_is_in_its_exit_code(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    assert (await run(driver, workspace, "kill -9 $$")).exit_code == 128 + signal.SIGKILL
    assert (await run(driver, workspace, "no-such-program")).exit_code == 127


async def test_localhost_works_inside_one_command(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    script = (
        b"import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        b"client = socket.create_connection(server.getsockname())\nprint('connected')\n"
    )
    workspace = make_workspace(driver, "a", {"x.py": script})

    assert (await run(driver, workspace, "python3 x.py")).output == b"connected\n"


async def test_many_commands_run_beside_each_other(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    folders = [make_workspace(driver, f"l{n}", {"n.txt": str(n).encode()}) for n in range(24)]

    outcomes = await asyncio.gather(*(run(driver, folder, "cat n.txt") for folder in folders))

    assert [o.output for o in outcomes] == [str(n).encode() for n in range(24)]


async def test_a_cancelled_command_is_ended_with_all_it_started(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})
    command = "(while true; do echo x >> grows; sleep 0.01; done) & sleep 100"

    task = asyncio.create_task(run(driver, workspace, command, 100))
    await appears(workspace / "grows")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    size = (workspace / "grows").stat().st_size
    await asyncio.sleep(0.1)

    assert (workspace / "grows").stat().st_size == size


async def test_after_the_death_of_its_server_the_driver_starts_another(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})
    task = asyncio.create_task(run(driver, workspace, "touch started; sleep 100", 100))
    await appears(workspace / "started")

    os.kill(server_of(driver), signal.SIGKILL)

    with pytest.raises(SandboxError):
        await task
    assert (await run(driver, workspace, "echo back")).output == b"back\n"


async def test_no_process_outlives_the_driver(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})
    task = asyncio.create_task(run(driver, workspace, "touch started; sleep 100", 100))
    await appears(workspace / "started")
    server = server_of(driver)

    await driver.stop()

    with pytest.raises(SandboxError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


async def appears(path: Path) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)


def server_of(driver: ProcessDriver) -> int:
    """The process that is first in the sandbox's process namespace."""
    assert driver._process is not None
    outer = driver._process.pid
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
