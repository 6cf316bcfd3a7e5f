"""Other gateways, each installed from its registry in a virtual environment of its own."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from etude.common.http_server import open_listener

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "etude" / "peers"
START_S = 60
INSTALL_S = 600


class AbsentError(Exception):
    """A peer that could not be installed or started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One other gateway."""

    name: str
    requirements: str
    captures: bool
    """True if it keeps ids and log-probabilities of turns."""
    command: Callable[[Path, Path, int, str], Sequence[str]]
    """By the folder of its programs, a scratch folder, its port and the engine's address."""
    environment: Mapping[str, str]


def _rllm(programs: Path, scratch: Path, port: int, engine: str) -> Sequence[str]:
    (scratch / "path").write_text("/sessions/bench")
    database = str(scratch / "traces.db")
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker", engine]
    return [str(programs / "rllm-model-gateway"), *options, "--db-path", database]


PEERS = (Peer(name="rllm", requirements="rllm.txt", captures=True, command=_rllm, environment={}),)


@contextlib.contextmanager
def serve_engine() -> Iterator[str]:
    """Start the engine of all peers; yields its address."""
    port = free_port()
    module = [sys.executable, "-m", "gateway_bench.openai_engine", str(port)]
    paths = f"{HERE.parent}:{HERE.parents[1]}"
    with _running(module, {"PYTHONPATH": paths}) as process:
        _wait_for(process, f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def serve_peer(peer: Peer, scratch: Path, engine: str) -> Iterator[tuple[int, str]]:
    """Start a peer, installed if it is not; yields its process id and the address for clients.

    Raises:
        AbsentError: it cannot be installed, or does not start.
    """
    programs = install(peer)
    scratch.mkdir()
    port = free_port()
    with _running(peer.command(programs, scratch, port, engine), peer.environment) as process:
        _wait_for(process, f"http://127.0.0.1:{port}/health/liveliness")
        deadline_s = time.monotonic() + START_S
        while not (scratch / "path").exists():
            if time.monotonic() > deadline_s:
                raise AbsentError("it did not get ready")
            time.sleep(0.1)
        yield process.pid, f"http://127.0.0.1:{port}{(scratch / 'path').read_text()}"


def install(peer: Peer) -> Path:
    """Install a peer once for each list of its packages; returns the folder of its programs.

    Raises:
        AbsentError: a package cannot be had.
    """
    requirements = HERE / "peers" / peer.requirements
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"{peer.name}-{digest}"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        python = folder / "bin" / "python"
        for command in (
            ["venv", "--python", "3.11", str(folder)],
            ["pip", "install", "--python", str(python), "-r", str(requirements)],
        ):
            uv = shutil.which("uv") or str(HERE.parents[1] / ".tools" / "bin" / "uv")
            done = subprocess.run(
                [uv, *command], capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
            if done.returncode:
                raise AbsentError(done.stderr.strip().splitlines()[-1])
        (folder / "installed").touch()
    return folder / "bin"


def free_port() -> int:
    """Return a port that nothing listens on."""
    with open_listener("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [*command],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until anything answers there.

    Raises:
        AbsentError: nothing did in time.
    """
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(url, timeout=5)
            return
        time.sleep(0.3)
    raise AbsentError("it did not start")
