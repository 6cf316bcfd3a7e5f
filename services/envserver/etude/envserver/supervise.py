"""Keeps a node daemon running, and ends its machines when it ends itself.

A daemon that was killed is started again at once and takes up the machines that it left. They must
not outlive this process, though: it is the pod. In a container it is the first process, and the
kernel sees to that; elsewhere it makes a cell. Where it may not, it adopts what the daemon leaves
and ends it, unless it is killed itself.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from etude.envserver import cell
from etude.envserver.drivers.sandbox import kernel

log = logging.getLogger(__name__)

CALM_S = 10.0
"""A daemon that lived this long did not fail at its start."""
MAX_QUICK = 5
"""Failures at the start, one after the other, until whoever runs this has to see to it."""
CONFIGURATION_ERROR = 78
_FIRST_DELAY_S = 0.1
_STEP_S = 0.05


def supervise(command: Sequence[str]) -> int:
    """Run a daemon, and again whenever it dies; its exit code once it is over."""
    keeper = Keeper(command)
    if os.getpid() == 1:
        return keeper.run()
    if cell.is_possible():
        return cell.run(keeper.run)
    log.warning(
        "no PID namespace: machines stay if this process is killed; run as root, or allow user"
        " namespaces (sysctl user.max_user_namespaces=10000)"
    )
    kernel.adopt_orphans()
    try:
        return keeper.run()
    finally:
        _end_children()


class Keeper:
    """One daemon, started again when it dies."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._daemon: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Keep the daemon until it ends by itself or is told to; returns its exit code."""
        for number in cell.ENDING:
            signal.signal(number, self._told)
        signal.signal(signal.SIGUSR1, self._asked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, cell.ENDING)
        quick = 0
        while True:
            began_s = time.monotonic()
            code = self._live()
            if self._stopping or code in {0, CONFIGURATION_ERROR}:
                return code if code >= 0 else 128 - code
            quick = quick + 1 if time.monotonic() - began_s < CALM_S else 0
            if quick >= MAX_QUICK:
                log.error("the daemon ended with %d for the %d. time at its start", code, quick)
                return code if code >= 0 else 128 - code
            log.warning("the daemon ended with %d and is started again", code)
            self._wait(_FIRST_DELAY_S * 2**quick)

    def _live(self) -> int:
        # It must not die of being asked for its stacks before it has a handler for that.
        handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._daemon = subprocess.Popen(self._command)
        signal.signal(signal.SIGUSR1, handler)
        if self._stopping:
            self._daemon.terminate()
        while True:
            # Also machines whose daemon has died are our children now.
            pid, status = os.waitpid(-1, 0)
            if pid == self._daemon.pid:
                self._daemon = None
                return os.waitstatus_to_exitcode(status)

    def _wait(self, delay_s: float) -> None:
        until_s = time.monotonic() + delay_s
        while time.monotonic() < until_s and not self._stopping:
            time.sleep(_STEP_S)

    def _told(self, number: int, _: object) -> None:
        self._stopping = True
        self._pass_on(number)

    def _asked(self, number: int, _: object) -> None:
        """Somebody wants to see stacks: the daemon's, for these say nothing."""
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        daemon = self._daemon
        if daemon is not None:
            # It is ours and not waited for, so the number is not another's.
            os.kill(daemon.pid, number)


def _end_children() -> None:
    """Kill every child, and those that become ours when they die."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text(encoding="ascii", errors="replace")
                if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


def main() -> NoReturn:
    """Supervise the daemon of a node."""
    sys.exit(supervise([sys.executable, "-m", "etude.envserver.main", "node"]))
