"""A process that is told to end while it starts ends, also as the first of a container."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from etude.common.errors import Problem, StoreError, UserError
from etude.common.process import EXIT_CONFIGURATION, read_settings, run_service

PROGRAM = """
import time
from etude.common.process import exit_on_sigterm

exit_on_sigterm()
print("starts", flush=True)
while True:
    time.sleep(0.05)  # a signal just before a sleep is seen after it
"""
FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("before", [(), FIRST], ids=["on a machine", "in a container"])
def test_it_ends_at_once_with_the_code_of_the_signal(before: Sequence[str]) -> None:
    words = (*before, sys.executable, "-c", PROGRAM)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = process.stdout.readline()
    if before and not started:
        _, why = process.communicate(timeout=60)
        pytest.skip(f"no namespaces here: {why.strip()}")
    (told,) = children_of(process.pid) if before else [process.pid]
    os.kill(told, signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def missing() -> str:
    env: dict[str, str] = {}
    return env["ETUDE_RUN_FILE"]


def invalid() -> str:
    raise ValueError("ETUDE_PORT: 'x' is not a valid port")


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (missing, "etude-test: ETUDE_RUN_FILE is not set\n"),
        (invalid, "etude-test: ETUDE_PORT: 'x' is not a valid port\n"),
    ],
)
def test_a_bad_setting_exits_with_one_line(
    capsys: pytest.CaptureFixture[str], read: Callable[[], str], line: str
) -> None:
    with pytest.raises(SystemExit) as end:
        read_settings("etude-test", read)
    assert end.value.code == EXIT_CONFIGURATION
    assert capsys.readouterr().err == line


async def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError(Problem("InvalidSpec", "cannot be read", "run.json", "write it again")), 78),
        (OSError("the port is taken"), 1),
        (StoreError("the store does not answer"), 1),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [StoreError("no answer")])]), 1),
        (
            ExceptionGroup(
                "tasks", [OSError("no"), UserError(Problem("InvalidKeys", "none", "keys", "add"))]
            ),
            78,
        ),
    ],
)
def test_a_known_error_of_a_service_exits_with_its_code(error: Exception, code: int) -> None:
    with pytest.raises(SystemExit) as end:
        run_service("etude-test", fail(error))
    assert end.value.code == code


def test_an_unknown_error_of_a_service_is_raised_whole() -> None:
    errors = ExceptionGroup("tasks", [StoreError("no answer"), KeyError("unknown")])
    with pytest.raises(ExceptionGroup) as caught:
        run_service("etude-test", fail(errors))
    assert caught.value is errors
