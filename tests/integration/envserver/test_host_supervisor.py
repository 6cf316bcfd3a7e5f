"""A daemon that is kept running, and what it starts, which ends with whoever keeps it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 60.0
DAEMON = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
# As monitors of machines do, it leaves group and session.
subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(os.environ["STARTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
SUPERVISOR = """
import sys
from etude.envserver import host_supervisor, pid_namespace
if sys.argv[1] != "namespace":
    pid_namespace.is_possible = lambda: False
sys.exit(host_supervisor.supervise([sys.executable, "-c", sys.argv[2]]))
"""


class Supervised:
    """A supervisor with its daemon."""

    def __init__(self, folder: Path, daemon: str, kind: str) -> None:
        self.starts = folder / "starts"
        self.mark = f"STARTS={self.starts}".encode()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, kind, daemon],
            env={"PATH": os.environ["PATH"], "STARTS": str(self.starts)},
        )

    def num_starts(self) -> int:
        return len(self.starts.read_text().split()) if self.starts.exists() else 0

    def living(self, program: bytes) -> list[int]:
        """Processes that the daemon or its supervisor left, by what they run."""
        return [pid for pid, words in self._all() if program in words]

    def _all(self) -> Iterator[tuple[int, bytes]]:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (folder / "environ").read_bytes():
                    yield int(folder.name), (folder / "cmdline").read_bytes()


def until(condition: Callable[[], object]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    made: list[Supervised] = []

    def start(daemon: str = DAEMON, kind: str = "namespace") -> Supervised:
        made.append(Supervised(tmp_path, daemon, kind))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.wait()
        for pid in each.living(b""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(text.rpartition(")")[2].split()[1])


@pytest.mark.parametrize("kind", ["namespace", "no namespace"])
def test_a_killed_daemon_is_started_again_and_what_it_left_goes_on(
    supervise: Supervise, kind: str
) -> None:
    supervised = supervise(kind=kind)
    until(lambda: supervised.num_starts() == 1)
    (first,) = supervised.living(b"sleep\0")
    os.kill(parent(first), signal.SIGKILL)
    until(lambda: supervised.num_starts() == 2)
    assert first in supervised.living(b"sleep\0")
    assert len(supervised.living(b"sleep\0")) == 2

    supervised.process.terminate()
    assert supervised.process.wait(LIMIT_S) == 3
    until(lambda: not supervised.living(b""))


ASKED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
def told(*_):
    open(os.environ["STARTS"], "a").write("asked\\n")
time.sleep(0.3)  # as long as imports
open(os.environ["STARTS"], "a").write(f"{os.getpid()}\\n")
time.sleep(0.3)
signal.signal(signal.SIGUSR1, told)
open(os.environ["STARTS"], "a").write("ready\\n")
while True:
    time.sleep(600)
"""


def test_a_daemon_is_asked_for_its_stacks_and_lives_on_also_while_it_starts(
    supervise: Supervise,
) -> None:
    supervised = supervise(ASKED, "no namespace")

    def words() -> list[str]:
        starts = supervised.starts
        return starts.read_text().split() if starts.exists() else []

    until(lambda: len(words()) == 1)
    supervised.process.send_signal(signal.SIGUSR1)  # before it can hear of it
    until(lambda: "ready" in words())
    supervised.process.send_signal(signal.SIGUSR1)
    until(lambda: "asked" in words())
    assert len(words()) == 3, "it was started once"


def test_whatever_ran_ends_with_a_supervisor_that_is_killed(supervise: Supervise) -> None:
    supervised = supervise()
    until(lambda: supervised.num_starts() == 1)
    assert supervised.living(b"sleep\0")
    supervised.process.kill()
    until(lambda: not supervised.living(b""))


def test_a_daemon_that_cannot_run_as_it_is_told_to_is_not_started_again(
    supervise: Supervise,
) -> None:
    supervised = supervise("import os; open(os.environ['STARTS'], 'a').write('x\\n'); os._exit(78)")
    assert supervised.process.wait(LIMIT_S) == 78
    assert supervised.num_starts() == 1


def test_a_daemon_that_always_dies_at_its_start_is_given_up(supervise: Supervise) -> None:
    supervised = supervise(
        "import os; open(os.environ['STARTS'], 'a').write('x\\n'); os.kill(os.getpid(), 9)"
    )
    assert supervised.process.wait(LIMIT_S) == 128 + 9
    assert supervised.num_starts() == 5
