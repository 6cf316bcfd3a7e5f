"""A real engine's place: the role as a process, killed and started again, and its two services."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tests.harness.chaos.engines.policy import CONTEXT
from tests.harness.chaos.engines.role import to_file
from tests.harness.chaos.settings import RUN, Settings
from tests.support.free_ports import reserve_ports

from etude.common.rpc.channels import dial
from etude.common.weights import VersionId
from etude.v1 import inference_pb2_grpc, weights_pb2, weights_pb2_grpc

ROOT = Path(__file__).parents[4]
END_S = 60.0
CALL_S = 60.0
PROBE_S = 5.0
CONCURRENT = 8
ATTEMPTS, AGAIN_S = 50, 0.2
"""Longer than any outage of a run."""


def resolved_run(model: Path, store: str) -> Mapping[str, Any]:
    """The file that the operator mounts into the role."""
    phase = {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 1,
        "optimizer": {"learningRate": "1e-3"},
        "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    }
    role = {"maxModelLen": CONTEXT, "maxConcurrent": CONCURRENT, "kvCacheMib": 64}
    spec = {
        "model": {"uri": model.as_uri()},
        "storage": {"uri": store},
        "phases": [phase],
        "roles": {"inference": role},
        "weights": {"dtype": "BFloat16", "advanced": {"auditEvery": 10, "undoDepth": 2}},
    }
    return {"name": "chaos", "uid": RUN, "spec": spec}


class CutOffError(Exception):
    """The engine was killed, and its channel closed, in the middle of a call."""


@contextmanager
def cut_off() -> Iterator[None]:
    """Tell a closed channel, which cancels its calls, from an end of the task itself.

    Raises:
        CutOffError: the channel was closed.
        CancelledError: the task is to end.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CutOffError from None


@dataclass(slots=True)
class EngineProcess:
    """One place; its scratch folder outlives its processes, as a pod's does."""

    settings: Settings
    place: str
    lives: int = 0
    status: weights_pb2.WeightStatus | None = None
    """As it was last heard; None while nobody answers."""
    killed: set[str] = field(default_factory=set)
    """Who was ended by us."""
    inference: Any = None
    weights: Any = None
    _process: "subprocess.Popen[bytes] | None" = None
    _channel: grpc.aio.Channel | None = None
    _probe_port: int = 0

    @property
    def who(self) -> str:
        """The present process, by name of its journal."""
        return f"{self.place}-{self.lives:03d}"

    @property
    def is_started(self) -> bool:
        """Whether there is a process that should run."""
        return self._process is not None

    @property
    def live(self) -> VersionId | None:
        """The version that it serves, if it serves one."""
        status = self.status
        if status is None or status.state not in {
            weights_pb2.REPLICA_STATE_SERVING,
            weights_pb2.REPLICA_STATE_CATCHING_UP,
        }:
            return None
        return VersionId.from_proto(status.live)

    @property
    def exit_status(self) -> int | None:
        """Of a process that has ended."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start a process; it answers tens of seconds later. Only on the main thread."""
        self.lives += 1
        folder = self.settings.folder
        settings_file, run_file = folder / "settings.json", folder / "run.json"
        to_file(self.settings, settings_file)
        run_file.write_text(json.dumps(resolved_run(folder / "model", self.settings.url)))
        grpc_port, http_port, self._probe_port = reserve_ports(3)
        variables = {
            "ETUDE_RUN_FILE": str(run_file),
            "ETUDE_SCRATCH": str(folder / "scratch" / self.place),
            "ETUDE_PORT": str(grpc_port),
            "ETUDE_HTTP_PORT": str(http_port),
            "ETUDE_PROBE_PORT": str(self._probe_port),
            "ETUDE_POD": f"chaos-inference-{self.place}",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        command = [
            sys.executable,
            "-m",
            "tests.harness.chaos.engines.role",
            str(settings_file),
            self.who,
        ]
        with (folder / f"{self.who}.err").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables}, stdout=log, stderr=log
            )
        self._channel = dial(f"127.0.0.1:{grpc_port}")
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.weights = weights_pb2_grpc.WeightServiceStub(self._channel)

    async def look(self) -> None:
        """Ask for the status; what there was of it is forgotten if nobody answers."""
        who = self.who
        try:
            with cut_off():
                answer = await self.weights.GetWeightStatus(
                    weights_pb2.GetWeightStatusRequest(), timeout=PROBE_S
                )
        except (grpc.aio.AioRpcError, CutOffError):
            self.status = None
            return
        if who == self.who and who not in self.killed:
            self.status = answer.status

    async def call(self, method: str, version: VersionId | None) -> None:
        """One of the calls that take a version."""
        request = getattr(weights_pb2, f"{method}Request")(
            version=None if version is None else version.to_proto()
        )
        with cut_off():
            await getattr(self.weights, method)(request, timeout=CALL_S)

    async def insist(self, method: str, version: VersionId | None) -> None:
        """The same, again and again while the store fails.

        Raises:
            AioRpcError: it fails for another reason, or for too long.
        """
        for _ in range(ATTEMPTS):
            try:
                await self.call(method, version)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                return
        await self.call(method, version)

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self.killed.add(self.who)
        self._process.kill()
        self._process.wait()
        await self._forget()

    async def stop(self) -> int | None:
        """SIGTERM; its exit status, or None if it had to be killed."""
        if self._process is None:
            return 0
        self.killed.add(self.who)
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        finally:
            await self._forget()

    def metrics(self) -> str:
        """What the probe port says of bytes, lags and audits."""
        url = f"http://127.0.0.1:{self._probe_port}/metrics"
        with urllib.request.urlopen(url, timeout=PROBE_S) as reply:
            text: str = reply.read().decode()
        return text

    def peak_rss_kib(self) -> int:
        """Most memory that the process has had."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def last_words(self) -> list[str]:
        """The end of what the present process wrote."""
        return (self.settings.folder / f"{self.who}.err").read_text().splitlines()[-20:]

    async def _forget(self) -> None:
        self.status = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
