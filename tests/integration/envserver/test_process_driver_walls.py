"""What a command can not reach from the process driver."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process.driver import ProcessDriver

MakeWorkspace = Callable[..., Path]

TESTS = {
    "shop/core.py": b"def add(a, b):\n    return a - b\n",
    "tests/test_repo.py": b"from shop.core import add\ndef test_add():\n    assert add(1, 2) == 3",
}
VERIFIER = (
    b"import pathlib, subprocess, sys\n"
    b"code = 'import sys; sys.path.insert(0, \"/workspace\"); '\n"
    b"code += 'from shop.core import add; print(add(1, 2))'\n"
    b"done = subprocess.run([sys.executable, '-I', '-c', code], capture_output=True, text=True)\n"
    b"pathlib.Path('/logs/reward').write_text('1' if done.stdout == '3\\n' else '0')\n"
)


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


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/x",
        "/etc/passwd",
        "/x",
        "/opt/etude/bin/python3",
        "/opt/etude/lib/minitest.py",
        "/.etude/x",
        "/proc/sys/kernel/hostname",
        "/dev/x",
        "/tests/x",
    ],
)
async def test_nothing_of_the_host_can_be_written(
    driver: ProcessDriver, make_workspace: MakeWorkspace, path: str
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(driver, workspace, f"echo x >> {path}")

    assert outcome.exit_code != 0


async def test_no_file_of_the_host_can_be_read(
    driver: ProcessDriver, make_workspace: MakeWorkspace, tmp_path: Path
) -> None:
    workspace = make_workspace(driver, "a", {"link": b""})
    make_workspace(driver, "b", {"canary": b"CANARY"})
    (tmp_path / "canary").write_text("CANARY")
    (workspace / "link").unlink()
    (workspace / "link").symlink_to(tmp_path)
    private = "/.etude/leases/b/workspace/canary"
    paths = (
        f"{tmp_path}/canary link/canary ../../b/workspace/canary {private} /proc/1/root{private}"
    )

    outcome = await run(
        driver,
        workspace,
        f"cat {paths} /proc/1/environ /etc/shadow; ls /root /var /sys",
    )

    assert b"CANARY" not in outcome.output
    assert outcome.output.count(b"\n") == 10


async def test_processes_of_the_host_and_of_neighbours_are_out_of_sight(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(
        driver, workspace, f"ls /proc | grep -c '^[0-9]'; kill -9 {os.getpid()}; kill -9 1; echo on"
    )

    lines = outcome.output.splitlines()
    assert int(lines[0]) <= 4
    assert lines[-1] == b"on"


async def test_there_is_no_network(driver: ProcessDriver, make_workspace: MakeWorkspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import socket\n"
            f"peers = ('127.0.0.1', {port}), ('::1', {port}), ('169.254.169.254', 80)\n"
            "for peer in (*peers, ('8.8.8.8', 53)):\n"
            "    try:\n        socket.create_connection(peer, 2); print('reached', peer)\n"
            "    except OSError: pass\n"
            "for family in (17, 40, 38):\n"
            "    try:\n        socket.socket(family, socket.SOCK_RAW); print('opened', family)\n"
            "    except OSError: pass\n"
            "try:\n    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('raw')\n"
            "except OSError: pass\n"
            "try:\n    socket.gethostbyname('example.com'); print('resolved')\n"
            "except OSError: pass\n"
            "print('done')\n"
        )
        outcome = await script(driver, make_workspace(driver, "a", {}), code)

    assert outcome.output == b"done\n"


async def test_commands_meet_on_no_socket_and_in_no_shared_memory(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    code = (
        "import socket, ctypes\n"
        "socket.socket(socket.AF_UNIX).bind(b'\\0canary')\n"
        "print(ctypes.CDLL(None).shmget(4711, 4096, 0o1000 | 0o2000 | 0o600))\n"
    )
    one = make_workspace(driver, "a", {})
    two = make_workspace(driver, "b", {})

    # 0o2000 is IPC_EXCL: a segment that the first command left would make the second fail.
    assert (await script(driver, one, code)).exit_code == 0
    assert int((await script(driver, two, code)).output) >= 0


@pytest.mark.parametrize(
    "code",
    [
        "libc.unshare(0x10000000)",
        "libc.unshare(0x20000)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "libc.umount2(b'/.etude', 2)",
        "libc.chroot(b'/tmp')",
        "libc.ptrace(16, 1, 0, 0)",
        "libc.syscall(321, 0, 0, 0)",
        "libc.syscall(425, 8, bytes(120))",
        "libc.syscall(250, 0, 0, 0)",
        "libc.syscall(298, bytes(120), 0, -1, -1, 0)",
        "libc.syscall(323, 0)",
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
        "libc.syscall(435, bytes(88), 88)",
        "libc.setuid(0)",
        "libc.reboot(0x1234567)",
        "libc.sethostname(b'x', 1)",
        "libc.mknod(b'/tmp/d', 0o20666, 0x103)",
        "libc.setns(0, 0)",
    ],
)
async def test_the_way_out_through_the_kernel_is_shut(
    driver: ProcessDriver, make_workspace: MakeWorkspace, code: str
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await script(
        driver, workspace, f"import ctypes\nlibc = ctypes.CDLL(None)\nprint({code})\n"
    )

    assert outcome.output == b"-1\n"


async def test_a_set_uid_program_gives_no_rights(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    workspace = make_workspace(driver, "a", {})

    outcome = await run(
        driver,
        workspace,
        "cp /bin/sh s; chmod 4755 s; ./s -c 'id -u'; su -c id; grep CapEff /proc/self/status",
    )

    assert outcome.output.startswith(b"1000\n")
    assert outcome.output.endswith(b"CapEff:\t0000000000000000\n")


@pytest.mark.parametrize(
    "plant",
    [
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "pathlib.py",
        "subprocess.py",
        "etude/agent/minitest.py",
    ],
)
async def test_planted_files_change_no_hidden_verdict(
    driver: ProcessDriver, make_workspace: MakeWorkspace, plant: str
) -> None:
    lie = b"import os\nopen('/logs/reward', 'w').write('1')\nos._exit(0)\n"
    workspace = make_workspace(driver, "a", {**TESTS, plant: lie})
    tests = make_workspace(driver, "t", {"verify.py": VERIFIER})

    for command in ("python3 /tests/verify.py", "exec python3 /tests/verify.py"):
        outcome = await driver.run(
            FolderCommand(
                command=command,
                workspace=workspace,
                tests=tests,
                timeout_s=20,
                collect="/logs/reward",
            )
        )
        assert (outcome.exit_code, outcome.collected) == (0, b"0")


@pytest.mark.parametrize("plant", ["conftest.py", "sitecustomize.py"])
async def test_planted_files_change_no_visible_verdict_either(
    driver: ProcessDriver, make_workspace: MakeWorkspace, plant: str
) -> None:
    workspace = make_workspace(driver, "a", {**TESTS, plant: b"import os\nos._exit(0)\n"})

    outcome = await run(driver, workspace, "pytest -q")

    assert outcome.output == b"FAILED test_add\n1 failed\n"


async def test_a_forked_child_cannot_read_the_graders_memory(
    driver: ProcessDriver, make_workspace: MakeWorkspace
) -> None:
    code = (
        "import os\n"
        "secret = 'SEC' + 'RET'\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    try:\n        open(f'/proc/{parent}/mem', 'rb'); print('opened')\n"
        "    except OSError as error:\n        print(type(error).__name__)\n"
        "    import sys; sys.stdout.flush(); os._exit(0)\n"
        "os.wait()\n"
    )
    workspace = make_workspace(driver, "a", {})

    assert (await script(driver, workspace, code)).output == b"PermissionError\n"
