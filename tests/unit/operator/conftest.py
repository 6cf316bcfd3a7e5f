"""A run and a pool to decide about."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from etude.common.api.kinds import EnvPool, RLRun
from etude.operator.builders.platform import Platform
from etude.operator.clock import ManualClock
from etude.operator.controller.event_recorder import EventRecorder
from etude.operator.controller.operator import Operator
from etude.operator.controller.reconciler import Reconciler
from etude.operator.controller.status_writer import StatusWriter
from etude.operator.controller.workqueue import WorkQueue
from etude.operator.kind_registry import KINDS_BY_NAME
from etude.operator.kube.interface import ConflictError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Manifest, Ref, labels, ref
from etude.operator.remotes.clients import MemoryRemoteClient
from etude.operator.remotes.followers import Followers
from etude.operator.remotes.report_store import ReportStore
from etude.v1 import run_pb2

Build = Callable[..., dict[str, Any]]


def run_manifest(**spec: Any) -> dict[str, Any]:
    pool = {"templates": [{"name": "python", "trust": "Trusted"}], "replicas": 2}
    body = {
        "model": {"uri": "s3://inputs/model"},
        "storage": {"uri": "s3://runs/demo", "secretRef": {"name": "s3"}},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 10,
                "optimizer": {"learningRate": "3e-3"},
                "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
            },
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": 40,
                "optimizer": {"learningRate": "4.5e-4"},
                "tasks": [{"name": "train", "uri": "s3://inputs/tasks", "environment": "repos"}],
                "algorithm": {"name": "DrGRPO"},
            },
        ],
        "roles": {
            "trainer": {"cpu": "1", "memory": "4Gi", "env": [{"name": "EMPTY"}]},
            "inference": {"replicas": 2, "gpusPerReplica": 1},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "tests", "function": "Verifier"}]},
        },
    }
    metadata = {"name": "demo", "namespace": "lab", "uid": "uid-run", "generation": 1}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": metadata,
        "spec": {**body, **spec},
    }


@pytest.fixture
def run_body() -> Build:
    """Makes the manifest of a run with the given parts of the spec replaced."""
    return run_manifest


def route_manifest(**spec: Any) -> dict[str, Any]:
    body = {
        "runRef": {"name": "demo"},
        "channels": {"stable": {"replicas": 2, "cpu": "4"}, "canary": {}},
        "gateway": {"keysRef": {"name": "gateway-keys"}},
        "feedback": {
            "keysRef": {"name": "feedback-keys"},
            "secretRef": {"name": "ledger"},
            "keyStoreUri": "s3://keys-of-users/coder",
        },
    }
    metadata = {"name": "coder", "namespace": "lab", "uid": "uid-route", "generation": 1}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "PolicyRoute",
        "metadata": metadata,
        "spec": {**body, **spec},
    }


@pytest.fixture
def route_body() -> Build:
    """Makes the manifest of a route with the given parts of the spec replaced."""
    return route_manifest


@pytest.fixture
def run() -> RLRun:
    return RLRun.model_validate(run_manifest())


@pytest.fixture
def pool() -> EnvPool:
    return EnvPool.model_validate(
        {
            "metadata": {"name": "repos", "namespace": "lab", "uid": "uid-pool"},
            "spec": {"templates": [{"name": "python"}], "isolation": {"minimum": "Process"}},
        }
    )


@pytest.fixture
def platform() -> Platform:
    parts = ("trainer", "inference", "rewards", "envserver", "operator", "gateway", "feedback")
    images = {part: f"etude/{part}:1" for part in parts}
    return Platform(images=images, allows_weak_isolation=True, namespace="etude-system")


TRAINER = "demo-trainer-0.demo-trainer:7000"


class Lab:
    """A MemoryCluster under the real reconciler, driven key by key on a clock that stands still."""

    def __init__(self, platform: Platform, tasks: asyncio.TaskGroup, *, is_lagging: bool) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(clock=self.clock, is_lagging=is_lagging)
        self.platform = platform
        self.tasks = tasks
        self.random = random.Random(0)
        self.writes: list[str] = []
        self.kill_at: int | None = None
        self.cluster.after_write = self._after
        self.cluster.subscribe(self._changed)
        self.sequence = 0
        self.epoch = 1
        self.kills = 0
        self.peers = MemoryRemoteClient()
        self.start()

    def start(self) -> None:
        """A fresh operator process over the same cluster."""
        self.book = ReportStore(self.clock)
        self.dirty: dict[Ref, None] = {}
        self.due: dict[Ref, float] = {}
        self.followers = Followers(self.cluster, self.book, self.peers, self._tell, self.tasks)
        self.reconciler = Reconciler(
            cluster=self.cluster,
            reports=self.book,
            client=self.peers,
            platform=self.platform,
            clock=self.clock,
            followers=self.followers,
            writer=StatusWriter(
                self.cluster, self.clock, EventRecorder(self.cluster, self.clock, "test")
            ),
        )
        self.operator = Operator(self.cluster, self.reconciler, WorkQueue())
        for kind in KINDS_BY_NAME:
            self.dirty |= {ref(m): None for m in self.cluster.list_objects(kind)}

    async def kill(self) -> None:
        """The operator process dies; what it knew is gone, the cluster stays."""
        self.kills += 1
        self.followers.unfollow_all()
        await asyncio.sleep(0)
        self.start()

    async def settle(self, limit: int = 400) -> None:
        """Reconcile, in random order, until nothing is left to look at now.

        Raises:
            AssertionError: that does not happen.
        """
        for _ in range(limit):
            for _ in range(6):
                await asyncio.sleep(0)
            if self.cluster.is_lagging:
                self.cluster.deliver_events(self.random.randint(0, 3))
            if self.dirty:
                await self._one(self.random.choice(list(self.dirty)))
            elif not self.cluster.deliver_events():
                await asyncio.sleep(0)
                if not self.dirty:
                    return
        raise AssertionError(f"does not settle: {list(self.dirty)}, {self.writes[-10:]}")

    async def advance(self, seconds: float) -> None:
        """Let time pass, and settle."""
        self.clock.advance(seconds)
        for key, due in list(self.due.items()):
            if due <= self.clock.monotonic_s():
                del self.due[key]
                self.dirty[key] = None
        await self.settle()

    async def _one(self, key: Ref) -> None:
        del self.dirty[key]
        try:
            again_s = await self.reconciler.reconcile(key)
        except ConflictError:
            self.dirty[key] = None
            return
        except Killed:
            await self.kill()
            return
        if again_s == 0:
            self.dirty[key] = None
        elif again_s is not None:
            self._tell(key, again_s)

    def run(self, name: str = "demo") -> RLRun:
        return RLRun.parse_known_fields(self.cluster.objects()[Ref("RLRun", "lab", name)])

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.run().status.conditions if c.type == kind)
        return found.status, found.reason

    def names(self, kind: str) -> list[str]:
        return sorted(key.name for key in self.cluster.objects() if key.kind == kind)

    def pods(self, role: str) -> list[Manifest]:
        found = self.cluster.objects().items()
        return [m for k, m in found if k.kind == "Pod" and labels(m).get("etude.dev/role") == role]

    async def say(self, **status: Any) -> None:
        """The controller reports its status; it has finished a step itself unless that is said."""
        message = run_pb2.RunStatus(phase="rl", target_step=40, observed_generation=99)
        message.last_step_unix_ms = status.pop("last_step_unix_ms", 1)
        message.MergeFrom(run_pb2.RunStatus(**status))
        await self._report(run_pb2.WatchRunResponse(status=message))

    async def tell_checkpoint(self, step: int) -> None:
        """The controller announces a checkpoint."""
        record = run_pb2.CheckpointRecord(
            step=step,
            reason="Scheduled",
            uri=f"s3://runs/demo/checkpoints/{step:012d}",
            manifest_digest=f"{step:064x}",
            size_bytes=10,
        )
        await self.tell(record)

    async def tell(self, record: run_pb2.CheckpointRecord) -> None:
        await self._report(run_pb2.WatchRunResponse(checkpoint=record))

    async def tell_event(self, reason: str) -> None:
        await self._report(run_pb2.WatchRunResponse(event=run_pb2.RunEvent(reason=reason)))

    async def _report(self, response: run_pb2.WatchRunResponse) -> None:
        self.sequence += 1
        response.run_uid = self.run().metadata.uid
        response.epoch, response.sequence = self.epoch, self.sequence
        self.peers.runs[TRAINER].append(response)
        await self.settle()

    def new_controller(self) -> None:
        """Another process answers as the controller; it has said nothing yet."""
        self.epoch += 1
        self.sequence = 0
        del self.peers.runs[TRAINER]

    async def finish_jobs(self, *, exit_code: int = 0, message: str = "") -> None:
        """Every Job's pod ends."""
        for key, pod in self.cluster.objects().items():
            if key.kind == "Pod" and labels(pod).get("etude.dev/role") == "janitor":
                self.end(key.name, exit_code=exit_code, message=message, restarts=0)
        await self.settle()

    def end(self, pod: str, *, exit_code: int, message: str = "", restarts: int = 1) -> None:
        """The container of a pod ends on its own."""
        ended = {"exitCode": exit_code, "reason": "Error", "message": message}
        container = {
            "name": "main",
            "ready": False,
            "restartCount": restarts,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "ended"}},
            "lastState": {"terminated": ended},
        }
        is_job = "janitor" in labels(self.cluster.objects()[Ref("Pod", "lab", pod)]).values()
        phase = ("Failed" if exit_code else "Succeeded") if is_job else "Running"
        conditions = [{"type": "Ready", "status": "False"}]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": [container]}
        self.cluster.set_status(Ref("Pod", "lab", pod), status)

    def _tell(self, key: Ref, delay_s: float) -> None:
        if delay_s:
            due = self.clock.monotonic_s() + delay_s
            self.due[key] = min(due, self.due.get(key, due))
        else:
            self.dirty[key] = None

    def _changed(self, manifest: Manifest) -> None:
        kind = KINDS_BY_NAME.get(manifest["kind"])
        if kind is not None:
            self.operator.references.index(ref(manifest), kind.references(manifest))
        for key in self.operator.affected_keys(manifest):
            self.dirty[key] = None

    def _after(self, verb: str, key: Ref) -> None:
        self.writes.append(f"{verb} {key.kind}/{key.name}")
        if self.kill_at == len(self.writes):
            raise Killed


class Killed(BaseException):
    """The operator process is gone."""


@pytest.fixture
async def lab_of(platform: Platform) -> AsyncIterator[Callable[..., Lab]]:
    """Makes labs; their tasks end with the test."""
    labs: list[Lab] = []

    def make(*, is_lagging: bool = False, seed: int = 0) -> Lab:
        made = Lab(platform, cast("asyncio.TaskGroup", asyncio), is_lagging=is_lagging)
        made.random.seed(seed)
        labs.append(made)
        return made

    yield make
    for made in labs:
        made.followers.unfollow_all()


@pytest.fixture
def lab(lab_of: Callable[..., Lab]) -> Lab:
    return lab_of()


@pytest.fixture
async def running(lab: Lab, run_body: Build) -> Lab:
    """A lab with a run that trains."""
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab
