"""Hostile guests of a live node: one in a process of its own, with a broker and clients."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.harness.fuzz import daemon
from tests.harness.fuzz.counts import Counts
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes
from tests.support.vm.guests import ROOT
from typing_extensions import override

from etude.common.rpc import channels
from etude.v1 import environments_pb2, environments_pb2_grpc

_WORKERS = 8
_MAX_TURNS = 12
_DEADLINE_S = 180.0
"""Above what a node waits for any guest; who still waits then waits for ever."""
_CALLS = (
    ("read_file", {"path": "a.py"}),
    ("write_file", {"path": "b.py", "content": "x"}),
    ("list_dir", {"path": "."}),
    ("glob", {"pattern": "**/*.py"}),
    ("grep", {"pattern": "a+"}),
    ("search_replace", {"path": "a.py", "old_string": "a", "new_string": "b"}),
    ("delete_file", {"path": "c"}),
    ("run_terminal", {"command": "true"}),
    ("run_terminal", {"command": "sleep 9", "is_background": True}),
    ("terminal_io", {"job": 1, "op": "read"}),
    ("terminal_io", {"job": 1, "op": "kill"}),
)
_SPEC = {
    "templates": [{"name": "python", "trust": "Trusted"}],
    "isolation": {"minimum": "Process"},
    "slotsPerReplica": 2 * _WORKERS,
}
_EXPECTED = frozenset(
    {
        *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND),
        *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED),
    }
)
"""What a client of a lost environment is told."""
_BROKEN = re.compile(r"Traceback \(most recent call last\)|never retrieved|Fatal Python error")


class HostileNode(Processes):
    """A broker, and a node with hostile guests."""

    seed = 0

    @override
    def start(
        self, role: str, changes: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        if role != "node":
            return super().start(role, changes)
        with (self.folder / "node.log").open("ab") as log:
            self.running[role] = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.fuzz.daemon", str(self.seed)],
                env=self.environment(role),
                cwd=ROOT,
                stderr=log,
            )
        return self.running[role]

    @property
    def taken(self) -> tuple[int, int]:
        """Frames that the node's channels have parsed or refused, and the latter."""
        try:
            taken, refused = (self.folder / "scratch" / daemon.TAKEN).read_text().split()
        except FileNotFoundError:
            return 0, 0
        return int(taken), int(refused)


@dataclass(slots=True)
class Siege:
    """Clients that go on until the node has taken so many frames."""

    node: HostileNode
    pool: Pool
    num_frames: int
    counts: Counts = field(default_factory=Counts)
    answers: Counter[str] = field(default_factory=Counter)
    _leases: int = 0

    async def run(self) -> None:
        """All of it; then an honest guest has to be served."""
        async with asyncio.TaskGroup() as group:
            for number in range(_WORKERS):
                group.create_task(self._work(number), name=f"client {number}")
        (self.node.folder / "scratch" / daemon.GOOD).touch()
        with self._watched("the lease after it"):
            [lease] = await self.pool.launch("canary")
            answer = await self.pool.turn(lease, ("1", "write_file", {"path": "b", "content": ""}))
            self.answers[f"canary: {answer[0]}"] += 1

    async def _work(self, number: int) -> None:
        while self.node.taken[0] < self.num_frames and self._is_alive():
            self._leases += 1
            with self._watched(f"client {number}"):
                [lease] = await self.pool.launch(f"batch {self._leases}")
                try:
                    await self._use(lease)
                finally:
                    await self._release(lease)

    async def _use(self, lease: environments_pb2.Lease) -> None:
        for turn in range(_MAX_TURNS):
            calls = [
                (f"{turn} {index}", name, arguments)
                for index, (name, arguments) in enumerate(_CALLS)
            ]
            answers = await self.pool.turn(lease, *calls)  # type: ignore[arg-type] # JSON of any kind
            assert len(answers) == len(calls)
            self.answers["turn"] += 1
            await self.pool.diff(lease)
            self.answers["diff"] += 1

    async def _release(self, lease: environments_pb2.Lease) -> None:
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
        await self.pool.broker.ReleaseLeases(request, timeout=_DEADLINE_S)

    @contextlib.contextmanager
    def _watched(self, who: str) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            self.answers[str(error.code())] += 1
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.counts.hang(f"{who} waits for ever", b"")
            elif error.code() not in _EXPECTED:
                self.counts.crash(f"{who}: {error.code()}: {error.details()}", b"")

    def ended(self, code: int) -> None:
        """Take into account how the node ended, and what it said."""
        self.counts.frames, self.counts.refused = self.node.taken
        if code != 0:
            self.counts.crash(f"the node ended with {code}", b"")
        for found in _BROKEN.finditer(self.node.log("node")):
            around = self.node.log("node")[found.start() : found.start() + 2_000]
            self.counts.crash(f"the node's log: {around}", b"")

    def _is_alive(self) -> bool:
        return self.node.running["node"].poll() is None


async def besieged(folder: Path, seed: int, num_frames: int) -> Siege:
    """What so many frames do to a node in this folder."""
    node = HostileNode(folder)
    node.seed = seed
    node.pool_file.write_text(json.dumps({"name": "fuzz", "uid": "u", "spec": _SPEC}))
    source = folder / "task" / "environment"
    source.mkdir(parents=True)
    (source / "a.py").write_text("a = 1\n")
    try:
        for role in ("broker", "node"):
            node.start(role)
        for role in ("broker", "node"):
            await node.ready(role)
        async with channels.dial(f"127.0.0.1:{node.ports['broker']}") as channel:
            broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
            watch = environments_pb2_grpc.PoolServiceStub(channel)
            pool = Pool(broker, watch, source.as_uri(), "Standard", _DEADLINE_S)
            siege = Siege(node, pool, num_frames)
            await siege.run()
        siege.ended(node.stop("node"))
    finally:
        for process in node.running.values():
            process.kill()
            process.wait()
    return siege
