"""Clients that grade diffs: each in a fresh environment, leased from a pool's broker."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import grpc
from typing_extensions import override

from etude.common import telemetry
from etude.common.harbor.grading_repairs import repair_grading
from etude.common.harbor.task import REWARD_PATH, HarborTask
from etude.common.rpc import channels
from etude.common.rpc.broker_channel import dial_brokers
from etude.common.rpc.retry_after import retry_after_s
from etude.v1 import (
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

log = logging.getLogger(__name__)

LEASE_MARGIN_S = 60.0
"""A lease for grading is not renewed: it outlasts the deadline by this."""


class GradingJob(NamedTuple):
    """Inputs of grading that all diffs of a group share."""

    task: HarborTask
    task_uri: str
    pool: str
    files: Mapping[str, bytes]
    """Hidden tests by path below /tests."""
    limit_s: float
    """Time limit of one run of the tests."""
    deadline_s: float
    """On the monotonic clock: diffs that are not graded by then are lost."""

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return self.deadline_s - time.monotonic()


class GradeInput(NamedTuple):
    """The graded result of one rollout."""

    diff: environments_pb2.WorkspaceDiff
    snapshot_id: str = ""
    """Snapshot of its environment, if the task is graded in a fork; else of what the task's set-up
    left, if there is one; empty for the base."""


class LostGrade(NamedTuple):
    """The platform gave no answer."""

    message: str


GradeAnswer = environments_pb2.GradeResponse | LostGrade


class GradingSandboxes(Protocol):
    """Grades results, each in an environment without an agent; answers in order."""

    async def grade(self, job: GradingJob, handed: Sequence[GradeInput]) -> list[GradeAnswer]: ...


@dataclass(slots=True)
class MemorySandboxes(GradingSandboxes):
    """Answers by a function of the diff, for tests."""

    answer: Callable[[environments_pb2.WorkspaceDiff], GradeAnswer]
    graded: list[environments_pb2.WorkspaceDiff] = field(default_factory=list)
    snapshot_ids: list[str] = field(default_factory=list)
    """Of these."""

    @override
    async def grade(self, job: GradingJob, handed: Sequence[GradeInput]) -> list[GradeAnswer]:
        diffs = [each.diff for each in handed]
        self.graded += diffs
        self.snapshot_ids += [each.snapshot_id for each in handed]
        return [self.answer(diff) for diff in diffs]


@dataclass(slots=True)
class BrokerSandboxes(GradingSandboxes):
    """Leases environments of the run's pools: one queue entry for all diffs of a snapshot."""

    brokers: Mapping[str, str]
    """host:port by pool."""
    templates: Mapping[str, str]
    """Template by pool."""
    run_id: str
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    @override
    async def grade(self, job: GradingJob, handed: Sequence[GradeInput]) -> list[GradeAnswer]:
        brokers = self.brokers[job.pool]
        channel = self._channels.setdefault(brokers, dial_brokers(brokers))
        broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        places: dict[str, list[int]] = {}
        for place, each in enumerate(handed):
            places.setdefault(each.snapshot_id, []).append(place)
        answers: dict[int, GradeAnswer] = {}

        async def grade(snapshot_id: str, mine: list[int]) -> None:
            batch = _Batch(self, broker, job, snapshot_id, [handed[place].diff for place in mine])
            answers.update(zip(mine, await batch.grade_all(), strict=True))

        async with asyncio.TaskGroup() as group:
            for snapshot_id, mine in places.items():
                group.create_task(grade(snapshot_id, mine), name=f"grade {snapshot_id}")
        return [answers[place] for place in range(len(handed))]

    def channel(self, target: str) -> grpc.aio.Channel:
        """The channel to this broker or host, opened once."""
        if target not in self._channels:
            self._channels[target] = channels.dial(target)
        return self._channels[target]

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()

    def launch(
        self, job: GradingJob, count: int, snapshot_id: str
    ) -> environments_pb2.LaunchBatchRequest:
        """Queue entry for `count` environments."""
        return environments_pb2.LaunchBatchRequest(
            run_id=self.run_id,
            # New each time: the leases of an earlier attempt are released by now.
            idempotency_key=f"grade-{uuid.uuid4().hex}",
            template=self.templates[job.pool],
            workspace=environments_pb2.WorkspaceSource(uri=f"{job.task_uri}/environment"),
            count=count,
            toolset="Standard",
            image=job.task.image,
            ttl_seconds=math.ceil(max(0, job.left_s) + LEASE_MARGIN_S),
            snapshot_id=snapshot_id,
            lease_class=environments_pb2.LEASE_CLASS_GRADING,
        )


AWAY_S = 1.0
"""Time until another broker is asked in place of one that does not answer."""
AWAY_TRIES = 5
_NO_LEASE = LostGrade("the broker ended without a lease")
_LATE = LostGrade("not graded within the deadline of its group")


@dataclass(slots=True)
class _Batch:
    """The leases of one queue entry, from the queue to their release."""

    sandboxes: BrokerSandboxes
    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    job: GradingJob
    snapshot_id: str
    diffs: Sequence[environments_pb2.WorkspaceDiff]
    answers: dict[int, GradeAnswer] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    _waiting: int = 0
    """Diffs that have no lease yet."""

    async def grade_all(self) -> list[GradeAnswer]:
        """One answer for each diff, in order, by the deadline."""
        missing = _NO_LEASE
        try:
            async with asyncio.timeout(self.job.left_s):
                await self.run()
        except TimeoutError:
            missing = _LATE
        finally:
            await self.release()
        return [self.answers.get(index, missing) for index in range(len(self.diffs))]

    async def run(self) -> None:
        """Lease an environment for each, and grade there."""
        self._waiting = len(self.diffs)
        async with asyncio.TaskGroup() as group:
            try:
                await self._receive(group)
            except grpc.aio.AioRpcError as error:
                for index in range(len(self.diffs)):
                    self.answers.setdefault(
                        index, LostGrade(f"the broker failed: {error.details()}")
                    )

    async def _receive(self, group: asyncio.TaskGroup) -> None:
        request = self.sandboxes.launch(self.job, len(self.diffs), self.snapshot_id)
        tries = AWAY_TRIES
        while True:
            try:
                return await self._launch(request, group)
            except grpc.aio.AioRpcError as error:
                later_s = retry_after_s(error)
                if tries and error.code() is grpc.StatusCode.UNAVAILABLE:
                    # Another broker of the pool takes over, and asks for what this one granted.
                    tries, later_s, request.is_repeated = tries - 1, AWAY_S, True
                # Environments that were granted are in use already.
                if later_s is None or self._waiting < len(self.diffs):
                    raise
                log.info("%s: retry in %.1f s", error.details(), later_s)
                await asyncio.sleep(later_s)

    async def _launch(
        self, request: environments_pb2.LaunchBatchRequest, group: asyncio.TaskGroup
    ) -> None:
        call = self.broker.LaunchBatch(
            request, timeout=self.job.left_s, metadata=telemetry.trace_metadata()
        )
        async for launched in call:
            self._waiting -= 1
            if launched.HasField("lease"):
                self._held.add(launched.lease.lease_id)
                group.create_task(self._use(launched), name=f"grade {launched.lease.lease_id}")
            else:
                self.answers[launched.index] = LostGrade(launched.failure.message)

    async def _use(self, launched: environments_pb2.LaunchBatchResponse) -> None:
        self.answers[launched.index] = await self._grade(launched.lease, self.diffs[launched.index])
        # A small pool grants the rest only after this release; otherwise one call releases all.
        if self._waiting > 0:
            self._held.discard(launched.lease.lease_id)
            await self._release([launched.lease.lease_id])

    async def _grade(
        self, lease: environments_pb2.Lease, diff: environments_pb2.WorkspaceDiff
    ) -> GradeAnswer:
        channel = self.sandboxes.channel(lease.endpoint)
        node = environments_pb2_grpc.EnvNodeServiceStub(channel)
        try:
            if self.job.task.setup and not self.snapshot_id:
                states = environment_state_pb2_grpc.EnvStateServiceStub(channel)
                if failure := await _set_up(states, lease, self.job):
                    return failure
            return await node.Grade(
                _requests(lease, self.job, diff),
                # The host counts the limit from the start of the tests, which may wait for a core.
                timeout=self.job.left_s,
                metadata=telemetry.trace_metadata(),
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                # Diff or tests are refused: no reward file, so the base decides whose fault.
                return environments_pb2.GradeResponse(output=(error.details() or "").encode())
            return LostGrade(f"node {lease.endpoint}: {error.code().name}: {error.details()}")

    async def release(self) -> None:
        """Release the leases that are still held."""
        held, self._held = sorted(self._held), set()
        if held:
            await self._release(held)

    async def _release(self, lease_ids: list[str]) -> None:
        try:
            await self.broker.ReleaseLeases(
                environments_pb2.ReleaseLeasesRequest(lease_ids=lease_ids),
                timeout=channels.CONTROL_DEADLINE_S,
            )
        except grpc.aio.AioRpcError as error:
            # They expire at their time to live; the grades are valid.
            log.warning("leases not released: %s", error.details())


async def _set_up(
    states: "environment_state_pb2_grpc.EnvStateServiceAsyncStub",
    lease: environments_pb2.Lease,
    job: GradingJob,
) -> LostGrade | None:
    """Run the task's set-up in a lease; None if it succeeded.

    Raises:
        AioRpcError: the host refuses, or went away.
    """
    request = environment_state_pb2.SetUpRequest(
        lease_id=lease.lease_id,
        control_token=lease.control_token,
        commands=job.task.setup,
        timeout_seconds=math.ceil(job.task.setup_timeout_s),
    )
    done = await states.SetUp(request, timeout=job.left_s, metadata=telemetry.trace_metadata())
    if done.succeeded == len(job.task.setup):
        return None
    tail = done.output[-200:].decode(errors="replace")
    return LostGrade(f"metadata.etude_setup[{done.succeeded}] failed: {tail!r}")


def _requests(
    lease: environments_pb2.Lease, job: GradingJob, diff: environments_pb2.WorkspaceDiff
) -> Iterator[environments_pb2.GradeRequest]:
    repaired = repair_grading(job.task, job.files)
    encoded = environments_pb2.GradeJob(
        diff=diff,
        artefacts=job.task.artefacts,
        files=[
            environments_pb2.WorkspaceFile(path=path, content=content)
            for path, content in repaired.files.items()
        ],
        environment=repaired.environment,
        protected_paths=repaired.protected,
        allowed_paths=repaired.allowed,
        command=job.task.command,
        timeout_seconds=math.ceil(job.limit_s),
        reward_path=REWARD_PATH,
        mode=(
            environments_pb2.GRADE_MODE_FORK
            if job.task.is_graded_in_fork
            else environments_pb2.GRADE_MODE_CLEAN
        ),
    ).SerializeToString()
    for chunk in channels.chunks(encoded):
        yield environments_pb2.GradeRequest(
            lease_id=lease.lease_id, control_token=lease.control_token, chunk=chunk
        )
