"""Operators as processes of their own, split off from one that has imported everything.

An import costs seconds of a busy core, and crash plans start hundreds of operators. What is split
off is the operator's own entry point; only what a test asks for differs: constants that make it
look more often, and a wall clock that is wrong.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
PARTS = ("TRAINER", "INFERENCE", "REWARDS", "ENVSERVER", "OPERATOR", "GATEWAY", "FEEDBACK")


@dataclass(slots=True)
class Nursery:
    """The process that operators are split off from."""

    process: asyncio.subprocess.Process
    _started: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    _ended: dict[int, "asyncio.Future[int]"] = field(default_factory=dict)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, request: Mapping[str, Any]) -> int:
        """The pid of a new operator."""
        assert self.process.stdin is not None
        async with self._asking:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            await self.process.stdin.drain()
            return await self._started.get()

    async def ended(self, pid: int) -> int:
        """Wait for the end of an operator; returns its exit code, negative for a signal."""
        return await asyncio.shield(self._end(pid))

    def _end(self, pid: int) -> "asyncio.Future[int]":
        return self._ended.setdefault(pid, asyncio.get_running_loop().create_future())

    async def listen(self) -> None:
        """Hear of starts and ends, until cancelled."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            told = json.loads(line)
            if "started" in told:
                self._end(told["started"])
                self._started.put_nowait(told["started"])
            else:
                self._end(told["ended"]).set_result(told["code"])


@contextlib.asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    """Until the end of the block, when every operator that is left is killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from tests.operator_faults.operators import serve; serve()",
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    made = Nursery(process)
    listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        listening.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def environment(*, pod: str, namespace: str, kubeconfig: Path, served: str = "") -> dict[str, str]:
    """As the chart sets it."""
    images = {f"ETUDE_IMAGE_{part}": f"etude/{part.lower()}:1" for part in PARTS}
    return images | {
        "PATH": os.environ["PATH"],
        "ETUDE_POD": pod,
        "ETUDE_NAMESPACE": namespace,
        "ETUDE_WATCH_NAMESPACES": served or namespace,
        "ETUDE_ALLOW_WEAK_ISOLATION": "1",
        "ETUDE_PROBE_PORT": "0",
        "ETUDE_TLS_MODE": "Plaintext",
        "ETUDE_TLS": "Plaintext",
        "KUBECONFIG": str(kubeconfig),
    }


def serve() -> NoReturn:
    """Be the process that operators are split off from."""
    from etude.operator import main, service  # noqa: F401, PLC0415 - kopf and the API client

    gc.freeze()
    answers = os.dup(1)
    signal.signal(signal.SIGCHLD, lambda *_: _reap(answers))
    for line in iter(sys.stdin.readline, ""):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        child = os.fork()
        if child == 0:
            os.close(answers)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            _become(json.loads(line))
            main.main()
        os.write(answers, json.dumps({"started": child}).encode() + b"\n")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.killpg(0, signal.SIGKILL)  # whoever asked is gone, and so shall be the operators
    sys.exit(0)


def _reap(answers: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            told = {"ended": pid, "code": os.waitstatus_to_exitcode(status)}
            os.write(answers, json.dumps(told).encode() + b"\n")


def _become(request: Mapping[str, Any]) -> None:
    with Path(request["log"]).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["env"])
    for name, value in request["constants"].items():
        module, _, attribute = name.rpartition(".")
        found = importlib.import_module(module)
        assert isinstance(getattr(found, attribute), type(value)), name
        setattr(found, attribute, value)
    if request["clock_s"]:
        _set_clock(request["clock_s"])


def _set_clock(ahead_s: float) -> None:
    """Let Python in this process believe in another wall clock; the monotonic one is right.

    gRPC keeps the right one: it hands times of day to its core, whose clock is that of the machine,
    and on a machine whose clock is wrong the two are wrong together.
    """
    import time  # noqa: PLC0415

    from grpc.aio import _utils as grpc_times  # noqa: PLC0415

    right = time.time

    vars(grpc_times)["time"] = SimpleNamespace(time=right)
    time.time = lambda: right() + ahead_s
