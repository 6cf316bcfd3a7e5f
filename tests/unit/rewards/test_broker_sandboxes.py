"""Grading in leased environments, with a broker and nodes that answer from a script."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from typing_extensions import override

from etude.common.rpc import server as rpc_server
from etude.rewards.grading import BrokerSandboxes, GradeInput, GradingJob, LostGrade
from etude.v1 import (
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)


class Broker(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Grants every lease at once, all of the node at its own address."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.asked: list[environments_pb2.LaunchBatchRequest] = []
        self.released: list[str] = []

    @override
    async def LaunchBatch(
        self, request: environments_pb2.LaunchBatchRequest, context: object
    ) -> AsyncIterator[environments_pb2.LaunchBatchResponse]:
        self.asked.append(request)
        for index in range(request.count):
            lease = environments_pb2.Lease(lease_id=f"lease-{index}", endpoint=self.endpoint)
            yield environments_pb2.LaunchBatchResponse(index=index, lease=lease)

    @override
    async def ReleaseLeases(
        self, request: environments_pb2.ReleaseLeasesRequest, context: object
    ) -> environments_pb2.ReleaseLeasesResponse:
        self.released += request.lease_ids
        return environments_pb2.ReleaseLeasesResponse()


@dataclass
class Node(environments_pb2_grpc.EnvNodeServiceServicer):
    """Grades all diffs but one, which hangs."""

    jobs: list[environments_pb2.GradeJob] = field(default_factory=list)

    @override
    async def Grade(
        self, request_iterator: AsyncIterator[environments_pb2.GradeRequest], context: object
    ) -> environments_pb2.GradeResponse:
        data = b"".join([request.chunk async for request in request_iterator])
        job = environments_pb2.GradeJob.FromString(data)
        self.jobs.append(job)
        if job.diff.deleted:
            await asyncio.Event().wait()
        evidence = environments_pb2.GradeEvidence(mode=job.mode, driver="scripted")
        return environments_pb2.GradeResponse(reward_file=b"1", evidence=evidence)


@dataclass
class States(environment_state_pb2_grpc.EnvStateServiceServicer):
    """Sets up every lease, or none."""

    fails: bool = False
    asked: list[environment_state_pb2.SetUpRequest] = field(default_factory=list)

    @override
    async def SetUp(
        self, request: environment_state_pb2.SetUpRequest, context: object
    ) -> environment_state_pb2.SetUpResponse:
        self.asked.append(request)
        if self.fails:
            return environment_state_pb2.SetUpResponse(exit_code=2, output=b"no disk")
        return environment_state_pb2.SetUpResponse(succeeded=len(request.commands))


@contextlib.asynccontextmanager
async def serving_of(
    broker: Broker, node: Node, states: States | None = None
) -> AsyncIterator[BrokerSandboxes]:
    """Sandboxes of these."""
    server = rpc_server.Server(["etude.v1.EnvBrokerService"])
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(broker, server.grpc_server)
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(node, server.grpc_server)
    if states is not None:
        environment_state_pb2_grpc.add_EnvStateServiceServicer_to_server(states, server.grpc_server)
    await server.start()
    broker.endpoint = f"127.0.0.1:{server.port}"
    sandboxes = BrokerSandboxes({"repos": broker.endpoint}, {"repos": "python"}, "run")
    yield sandboxes
    await sandboxes.close()
    await server.stop(0)


async def test_a_grade_that_does_not_come_takes_none_of_its_siblings_along(job: GradingJob) -> None:
    broker, node = Broker(), Node()  # type: ignore[abstract]  # the other calls never come
    diffs = [
        environments_pb2.WorkspaceDiff(),
        environments_pb2.WorkspaceDiff(deleted=["hangs"]),
        environments_pb2.WorkspaceDiff(),
    ]

    hurried = job._replace(limit_s=0.5, deadline_s=time.monotonic() + 2.0)
    async with serving_of(broker, node) as sandboxes:
        answers = await sandboxes.grade(hurried, [GradeInput(diff) for diff in diffs])

    assert [isinstance(answer, LostGrade) for answer in answers] == [False, True, False]
    assert sorted(broker.released) == ["lease-0", "lease-1", "lease-2"]
    assert {job.timeout_seconds for job in node.jobs} == {1}
    assert broker.asked[0].queue_timeout_seconds == 0, "the pool's own"
    assert {job.mode for job in node.jobs} == {environments_pb2.GRADE_MODE_CLEAN}


async def test_a_grade_runs_in_the_image_that_its_task_names(job: GradingJob) -> None:
    broker, node = Broker(), Node()  # type: ignore[abstract]  # the other calls never come
    task = replace(job.task, image="django-4")
    async with serving_of(broker, node) as sandboxes:
        timely = job._replace(task=task, deadline_s=time.monotonic() + 30.0)
        await sandboxes.grade(timely, [GradeInput(environments_pb2.WorkspaceDiff())])
    assert [each.image for each in broker.asked] == ["django-4"]


async def test_what_is_graded_in_a_fork_starts_from_its_own_snapshot(job: GradingJob) -> None:
    broker, node = Broker(), Node()  # type: ignore[abstract]  # the other calls never come
    nothing = environments_pb2.WorkspaceDiff()
    task = replace(job.task, is_graded_in_fork=True)

    async with serving_of(broker, node) as sandboxes:
        answers = await sandboxes.grade(
            job._replace(task=task, deadline_s=time.monotonic() + 30.0),
            [GradeInput(nothing, "end-1"), GradeInput(nothing), GradeInput(nothing, "end-2")],
        )

    assert not any(isinstance(answer, LostGrade) for answer in answers)
    asked = sorted((each.snapshot_id, each.count) for each in broker.asked)
    assert asked == [("", 1), ("end-1", 1), ("end-2", 1)]
    assert {job.mode for job in node.jobs} == {environments_pb2.GRADE_MODE_FORK}


async def test_a_task_is_set_up_where_its_tests_run_unless_a_snapshot_has_it(
    job: GradingJob,
) -> None:
    broker, node, states = Broker(), Node(), States()  # type: ignore[abstract]  # the other calls never come
    nothing = environments_pb2.WorkspaceDiff()
    task = replace(job.task, setup=("make deps", "make"), setup_timeout_s=90.0)

    async with serving_of(broker, node, states) as sandboxes:
        answers = await sandboxes.grade(
            job._replace(task=task, deadline_s=time.monotonic() + 30.0),
            [GradeInput(nothing, "group-1"), GradeInput(nothing)],
        )

    assert not any(isinstance(answer, LostGrade) for answer in answers)
    [asked] = states.asked
    assert (list(asked.commands), asked.timeout_seconds) == (["make deps", "make"], 90)
    assert sorted(each.snapshot_id for each in broker.asked) == ["", "group-1"]
    assert {job.mode for job in node.jobs} == {environments_pb2.GRADE_MODE_CLEAN}


async def test_a_set_up_that_fails_loses_the_grade_and_says_why(job: GradingJob) -> None:
    broker, node, states = Broker(), Node(), States(fails=True)  # type: ignore[abstract]  # the other calls never come
    task = replace(job.task, setup=("make deps",))

    async with serving_of(broker, node, states) as sandboxes:
        [answer] = await sandboxes.grade(
            job._replace(task=task, deadline_s=time.monotonic() + 30.0),
            [GradeInput(environments_pb2.WorkspaceDiff())],
        )

    assert answer == LostGrade("metadata.etude_setup[0] failed: 'no disk'")
    assert not node.jobs
