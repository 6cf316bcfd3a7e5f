"""Client of the jail process: starts it when needed, and again after it died."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from etude.agent.jail import process as jail_process
from etude.common.errors import UnavailableError


@dataclass(slots=True)
class JailedProgram:
    """Checks one file at a time; calls of several threads wait for each other."""

    command: Sequence[str]
    """The linter's file, and its arguments before the name."""
    _process: "subprocess.Popen[bytes] | None" = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, name: str, data: bytes) -> bytes | None:
        """The linter's output for a file; None if it breaks a limit.

        Raises:
            UnavailableError: the jail cannot be created here.
        """
        with self._lock:
            try:
                return self._exchange(name, data)
            except OSError as error:
                self._end()
                raise UnavailableError(f"the linter's jail failed: {error}") from error

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            self._end()

    def _exchange(self, name: str, data: bytes) -> bytes | None:
        stdin, stdout = self._streams()
        raw = os.fsencode(name)
        stdin.write(b"%d %d\n" % (len(raw), len(data)) + raw + data)
        stdin.flush()
        size = int(stdout.readline() or b"-2")
        if size < -1:
            raise OSError("it has ended")
        return None if size < 0 else stdout.read(size)

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", jail_process.__file__, *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        if process.stdin is None or process.stdout is None:
            raise OSError("it has no streams")
        return process.stdin, process.stdout

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
