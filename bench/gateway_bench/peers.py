"""Other gateways, each installed from its registry in a virtual environment of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.support.free_ports import reserve_port
from tests.support.programs import AbsentError, install_programs

HERE = Path(__file__).parent
START_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One other gateway."""

    name: str
    """Of its list of packages, too."""
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


def _litellm(programs: Path, scratch: Path, port: int, engine: str) -> Sequence[str]:
    model = {"model": "hosted_vllm/bench", "api_base": engine, "api_key": "none"}
    models = {"model_list": [{"model_name": "bench", "litellm_params": model}]}
    # YAML, of which JSON is a part.
    (scratch / "config.yaml").write_text(json.dumps(models))
    (scratch / "path").write_text("")
    options = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(programs / "litellm"), *options, "--config", str(scratch / "config.yaml")]


def _agent_lightning(programs: Path, scratch: Path, port: int, engine: str) -> Sequence[str]:
    program = str(HERE / "peers" / "agent_lightning.py")
    return [str(programs / "python"), program, str(port), engine, str(scratch / "path")]


_OFFLINE = {
    # Prices of models, from the internet.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
PEERS = (
    Peer(name="rllm", captures=True, command=_rllm, environment={}),
    Peer(name="agent_lightning", captures=True, command=_agent_lightning, environment=_OFFLINE),
    Peer(name="litellm", captures=False, command=_litellm, environment=_OFFLINE),
)


@contextlib.contextmanager
def serve_engine() -> Iterator[str]:
    """Start the engine of all peers; yields its address."""
    port = reserve_port()
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
    programs = install_programs(HERE / "peers" / f"{peer.name}.txt")
    scratch.mkdir()
    port = reserve_port()
    with _running(peer.command(programs, scratch, port, engine), peer.environment) as process:
        _wait_for(process, f"http://127.0.0.1:{port}/health/liveliness")
        deadline_s = time.monotonic() + START_S
        while not (scratch / "path").exists():
            if time.monotonic() > deadline_s:
                raise AbsentError("it did not get ready")
            time.sleep(0.1)
        yield process.pid, f"http://127.0.0.1:{port}{(scratch / 'path').read_text()}"


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
