"""The process driver on other machines than root's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, json, sys, tempfile
from pathlib import Path
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process.driver import ProcessDriver

async def main():
    with tempfile.TemporaryDirectory() as scratch:
        driver = ProcessDriver(Path(scratch))
        await driver.start()
        workspace = driver.leases / "a" / "workspace"
        workspace.mkdir(parents=True)
        (workspace / "test_a.py").write_text("def test_a():\\n    assert 0\\n")
        for entry in (workspace, *workspace.iterdir()):
            __import__("os").chown(entry, *driver.owner())
        for line in sys.argv[1:]:
            command = FolderCommand(command=line, workspace=workspace, timeout_s=30)
            outcome = await driver.run(command)
            print(json.dumps([outcome.exit_code, outcome.output.decode()]))
        await driver.stop()

asyncio.run(main())
"""
COMMANDS = (
    "pytest -q",
    "id -u; echo more >> test_a.py; touch /usr/x 2>&1 | tail -c 22",
    "bomb() { bomb | bomb & }; bomb; sleep 0.2; echo on",
)
NOBODY = 61_234
"""A user that no file belongs to."""


def answers(command: list[str], **options: object) -> list[tuple[int, str]]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(  # type: ignore[call-overload]  # options are passed on
        [*command, "-c", SCRIPT, *COMMANDS],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return [(code, output) for code, output in map(json.loads, done.stdout.splitlines())]


def refusal(command: list[str], **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]  # options are passed on
        [*command, "-c", SCRIPT, "true"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    assert "DriverUnavailableError" in done.stderr, done
    return str(done.stderr)


def check(found: list[tuple[int, str]]) -> None:
    tests, user, bomb = found
    assert tests == (1, "FAILED test_a\n1 failed\n")
    assert user == (0, "1000\nRead-only file system\n")
    assert bomb[1].endswith("on\n")


def is_open_to_all(path: Path) -> bool:
    return all(p.stat().st_mode & 0o001 for p in (path, *path.parents))


def python_for_all() -> str:
    """An interpreter of this version that every user may run."""
    for name in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        path = Path(name)
        if not path.exists() or not is_open_to_all(path.resolve()):
            continue
        version = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        if version.stdout.split()[1].split(".")[:2] == [str(n) for n in sys.version_info[:2]]:
            return name
    pytest.skip("no interpreter of this version is open to other users")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_gets_the_same_walls() -> None:
    if not is_open_to_all(Path(__file__).resolve().parent):
        pytest.skip("this repository is not open to other users")

    check(answers([python_for_all()], user=NOBODY, group=NOBODY, extra_groups=[]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mask parts of /proc")
def test_where_a_container_masks_proc_commands_run_without_one() -> None:
    # What container runtimes do; the kernel then refuses a new /proc in a user namespace.
    mask = 'mount --bind /dev/null /proc/timer_list && exec "$@"'

    check(answers(["unshare", "--mount", "sh", "-c", mask, "sh", sys.executable]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_root_of_a_rootless_container_gets_the_same_walls() -> None:
    if not is_open_to_all(Path(__file__).resolve().parent):
        pytest.skip("this repository is not open to other users")
    rootless = ["unshare", "--user", "--map-root-user", python_for_all()]

    check(answers(rootless, user=NOBODY, group=NOBODY, extra_groups=[]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its own id away")
def test_commands_never_run_as_the_hosts_root() -> None:
    said = refusal(["unshare", "--user", "--map-root-user", sys.executable])

    assert "commands would run as the host's root" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can forbid namespaces")
def test_a_machine_that_refuses_namespaces_is_told_how_to_allow_them() -> None:
    if not is_open_to_all(Path(__file__).resolve().parent):
        pytest.skip("this repository is not open to other users")
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", python_for_all()]

    said = refusal(command, user=NOBODY, group=NOBODY, extra_groups=[])

    assert "unshare user" in said
    assert "fix: run as root, or allow user namespaces" in said
