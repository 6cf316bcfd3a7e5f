"""Child processes that never outlive this process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.operator.local import parent_death

LOG_TAIL_BYTES = 2_048
"""Size of Kubernetes' termination message from a container's log."""


@dataclass(slots=True)
class ChildProcess:
    """A child process and its group."""

    _popen: subprocess.Popen[bytes]
    _pidfd: int
    _log: Path
    _log_start: int

    @classmethod
    def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], folder: Path, log: Path
    ) -> "ChildProcess":
        """Start a command in a session of its own, its output appended to a log.

        Raises:
            OSError: the log cannot be opened or the process not started.
        """
        # A bare interpreter ties itself to us and becomes the command (30 ms). A preexec_fn would
        # run Python between fork and exec, which can deadlock beside gRPC's threads.
        bare = [sys.executable, "-I", "-S", str(parent_death.__file__), str(os.getpid())]
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*bare, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(env),
                start_new_session=True,
            )
            return cls(popen, os.pidfd_open(popen.pid), log, output.tell())

    @property
    def pid(self) -> int:
        """Its process id, also that of its group."""
        return self._popen.pid

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, 128 + n after signal n.

        The rest of its group is killed, as in a container.
        """
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(self._pidfd, over.set)
        try:
            await over.wait()
            # It is not reaped before its group is killed, so the id cannot be another's.
            self.kill()
            code = self._popen.wait()
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Send SIGTERM to the process alone, as Kubernetes does."""
        # Popen.send_signal may reap, and then wait() could kill another process of the same id.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole group, unless the process has ended."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
