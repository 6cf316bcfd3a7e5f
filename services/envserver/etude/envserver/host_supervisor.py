"""Supervisor of a host daemon: restarts it, and ends its VMs when it ends itself.

A daemon that was killed is restarted immediately and adopts the VMs that it left. They must not
outlive this process, though: it is the pod. In a container it is the first process, and the kernel
ends them with it; elsewhere it makes a PID namespace. Where it may not, it adopts the orphans of
the daemon and ends them, unless it is killed itself.
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

from etude.common.process import EXIT_CONFIGURATION
from etude.envserver import pid_namespace
from etude.envserver.isolation import syscalls

log = logging.getLogger(__name__)

CALM_S = 10.0
"""A daemon that lived this long did not fail at its start."""
MAX_QUICK = 5
"""Consecutive failures at the start after which the supervisor gives up."""
_FIRST_DELAY_S = 0.1
_STEP_S = 0.05


def supervise(command: Sequence[str]) -> int:
    """Run a daemon, restarting it whenever it dies; returns its last exit code."""
    keeper = HostSupervisor(command)
    if os.getpid() == 1:
        return keeper.run()
    if pid_namespace.is_possible():
        return pid_namespace.run_in_namespace(keeper.run)
    log.warning(
        "no PID namespace: VMs stay if this process is killed; run as root, or allow user"
        " namespaces (sysctl user.max_user_namespaces=10000)"
    )
    syscalls.adopt_orphans()
    try:
        return keeper.run()
    finally:
        _end_children()


class HostSupervisor:
    """One daemon, restarted when it dies."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._daemon: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Keep the daemon running until it ends normally or is stopped; returns its exit code."""
        for number in pid_namespace.ENDING:
            signal.signal(number, self._on_stop_signal)
        signal.signal(signal.SIGUSR1, self._on_stacks_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, pid_namespace.ENDING)
        quick = 0
        while True:
            began_s = time.monotonic()
            code = self._run_daemon()
            if self._stopping or code in {0, EXIT_CONFIGURATION}:
                return code if code >= 0 else 128 - code
            quick = quick + 1 if time.monotonic() - began_s < CALM_S else 0
            if quick >= MAX_QUICK:
                log.error(
                    "the daemon failed at its start with exit code %d, %d times: giving up",
                    code,
                    quick,
                )
                return code if code >= 0 else 128 - code
            log.warning("the daemon ended with exit code %d and is restarted", code)
            self._wait(_FIRST_DELAY_S * 2**quick)

    def _run_daemon(self) -> int:
        # A request for its stacks must not kill it before it has a handler for that signal.
        handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._daemon = subprocess.Popen(self._command)
        signal.signal(signal.SIGUSR1, handler)
        if self._stopping:
            self._daemon.terminate()
        while True:
            # VMs whose daemon has died are children of this process, too.
            pid, status = os.waitpid(-1, 0)
            if pid == self._daemon.pid:
                self._daemon = None
                return os.waitstatus_to_exitcode(status)

    def _wait(self, delay_s: float) -> None:
        until_s = time.monotonic() + delay_s
        while time.monotonic() < until_s and not self._stopping:
            time.sleep(_STEP_S)

    def _on_stop_signal(self, number: int, _: object) -> None:
        self._stopping = True
        self._forward_signal(number)

    def _on_stacks_signal(self, number: int, _: object) -> None:
        """Forward a request for stacks: the daemon's are wanted."""
        self._forward_signal(number)

    def _forward_signal(self, number: int) -> None:
        daemon = self._daemon
        if daemon is not None:
            # It is an unreaped child, so the PID is not another process's.
            os.kill(daemon.pid, number)


def _end_children() -> None:
    """Kill every child, and the orphans that become children when those die."""
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
    """Supervise the daemon of a host."""
    sys.exit(supervise([sys.executable, "-m", "etude.envserver.main", "node"]))
