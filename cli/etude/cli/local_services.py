"""Services of one verb as processes of this machine, which end with it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.errors import Problem, UserError

START_TIMEOUT_S = 120.0
"""Pools of microVMs may boot an image first."""
STOP_TIMEOUT_S = 60.0
_LOG_END_BYTES = 2_000
_LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class LocalServices:
    """Processes of services, with a folder for their files and logs."""

    folder: Path
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
        """Start a module as a service and wait until it is ready; returns its host:port.

        Raises:
            UserError: it ended, or is not ready in time.
        """
        port, probe_port = _free_ports(2)
        scratch = self.folder / name / "scratch"
        scratch.mkdir(parents=True)
        own = {
            "ETUDE_SCRATCH": str(scratch),
            "ETUDE_PORT": str(port),
            "ETUDE_PROBE_PORT": str(probe_port),
        }
        # It is killed with this process, which may have no time to end it.
        bound = [sys.executable, "-m", "etude.operator.local.parent_death", str(os.getpid())]
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [*bound, sys.executable, "-m", *arguments],
                env={**os.environ, **own, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the verb, which ends them in order
            )
        self._started.append(process)
        self._wait_until_ready(name, process, f"http://{_LOOPBACK}:{probe_port}/readyz")
        return f"{_LOOPBACK}:{port}"

    def stop(self) -> None:
        """End all services, the last one first."""
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / name / "log"

    def _wait_until_ready(self, name: str, process: subprocess.Popen[bytes], url: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise self._failure(name, f"ended with {process.returncode}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(url, timeout=5) as answer,  # noqa: S310 - of this machine
            ):
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise self._failure(name, f"is not ready after {START_TIMEOUT_S:.0f} s")

    def _failure(self, name: str, what: str) -> UserError:
        said = self._log(name).read_bytes()[-_LOG_END_BYTES:].decode(errors="replace").strip()
        fix = "correct what it says; etude doctor checks this machine"
        return UserError(Problem("Unreachable", f"{what}: {said}", f"service {name}", fix))


@contextlib.contextmanager
def local_services(folder: Path) -> Iterator[LocalServices]:
    """Services that end with the block."""
    services = LocalServices(folder)
    try:
        yield services
    finally:
        services.stop()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(number)]
        for each in found:
            each.bind((_LOOPBACK, 0))
        return [each.getsockname()[1] for each in found]
