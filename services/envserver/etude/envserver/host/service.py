"""RPCs of a host for brokers, agents and graders."""

import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from opentelemetry import trace
from typing_extensions import override

from etude.common import telemetry
from etude.common.errors import InvalidFieldError, UnavailableError
from etude.common.rpc import channels
from etude.common.tls.policy import AuthenticatedCall
from etude.envserver import metrics
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.grading.grader import MAX_JOB_BYTES, Grader
from etude.envserver.host.host import Host
from etude.envserver.host.leases.preemption import hold_preempted
from etude.envserver.host.owned_leases import find_owned
from etude.envserver.host.workspace_change import ChangeTooLargeError
from etude.v1 import environments_pb2 as pb2
from etude.v1 import environments_pb2_grpc

tracer = trace.get_tracer("etude.envserver")

_KINDS = {1: "tool", 2: "timeout", 3: "invalid"}

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[_Request, _Response]


@dataclass(slots=True)
class HostService(environments_pb2_grpc.EnvNodeServiceServicer):
    """Translates between the wire and the host."""

    host: Host
    grader: Grader
    node_id: str = ""
    """Name of this host; orders for another one are refused."""
    draining: bool = False

    @override
    async def OpenEnvironments(
        self,
        request: pb2.OpenEnvironmentsRequest,
        context: Context[pb2.OpenEnvironmentsRequest, pb2.OpenEnvironmentsResponse],
    ) -> pb2.OpenEnvironmentsResponse:
        if self.draining:
            raise UnavailableError("this host is shutting down")
        if self.node_id and request.node_id not in {"", self.node_id}:
            raise UnavailableError(f"this is host {self.node_id}, not {request.node_id}")
        return pb2.OpenEnvironmentsResponse(outcomes=await self.host.open(request))

    @override
    async def CloseEnvironments(
        self,
        request: pb2.CloseEnvironmentsRequest,
        context: Context[pb2.CloseEnvironmentsRequest, pb2.CloseEnvironmentsResponse],
    ) -> pb2.CloseEnvironmentsResponse:
        await self.host.close(request.lease_ids)
        return pb2.CloseEnvironmentsResponse()

    @override
    async def PreemptEnvironments(
        self,
        request: pb2.PreemptEnvironmentsRequest,
        context: Context[pb2.PreemptEnvironmentsRequest, pb2.PreemptEnvironmentsResponse],
    ) -> pb2.PreemptEnvironmentsResponse:
        paused = await self.host.preemptions.preempt(request.lease_ids, request.count)
        return pb2.PreemptEnvironmentsResponse(lease_ids=paused)

    @override
    async def ResumePreempted(
        self,
        request: pb2.ResumePreemptedRequest,
        context: Context[pb2.ResumePreemptedRequest, pb2.ResumePreemptedResponse],
    ) -> pb2.ResumePreemptedResponse:
        resumed = await self.host.preemptions.resume(request.lease_ids)
        return pb2.ResumePreemptedResponse(lease_ids=resumed)

    @override
    async def RunTurn(
        self, request: pb2.RunTurnRequest, context: Context[pb2.RunTurnRequest, pb2.RunTurnResponse]
    ) -> pb2.RunTurnResponse:
        environment = find_owned(self.host, request.lease_id, context)
        environment.check_agent(request.agent_token)
        await hold_preempted(environment.record.held)
        started_ns = time.time_ns()
        known = request.known_calls.call_ids if request.HasField("known_calls") else None
        results = await environment.run_turn(request.calls, known)
        with telemetry.continue_trace(context.invocation_metadata()):
            for call, result in zip(request.calls, results, strict=True):
                _record_call(call, result, started_ns, environment.toolset.tools.keys())
        return pb2.RunTurnResponse(results=results)

    @override
    async def Diff(
        self, request: pb2.DiffRequest, context: Context[pb2.DiffRequest, pb2.DiffResponse]
    ) -> AsyncIterator[pb2.DiffResponse]:
        environment = find_owned(self.host, request.lease_id, context)
        environment.check_control(request.control_token)
        await hold_preempted(environment.record.held)
        try:
            diff = await environment.diff()
        except ChangeTooLargeError as error:
            yield pb2.DiffResponse(too_large=str(error))
            return
        for chunk in channels.chunks(diff.SerializeToString()):
            yield pb2.DiffResponse(chunk=chunk)

    @override
    async def Grade(
        self,
        request_iterator: AsyncIterator[pb2.GradeRequest],
        context: Context[pb2.GradeRequest, pb2.GradeResponse],
    ) -> pb2.GradeResponse:
        environment, job = await self._job(request_iterator, context)
        started_s = time.monotonic()
        with (
            telemetry.continue_trace(context.invocation_metadata()),
            tracer.start_as_current_span("grade"),
        ):
            response = await self.grader.grade(
                environment.source,
                job,
                template=environment.record.template,
                fork=environment,
            )
        if job.mode == pb2.GRADE_MODE_FORK:
            await self.host.states.drop_graded(environment)
        metrics.grade_seconds.observe(time.monotonic() - started_s)
        return response

    async def _job(
        self, requests: AsyncIterator[pb2.GradeRequest], call: AuthenticatedCall
    ) -> tuple[LeasedEnvironment, pb2.GradeJob]:
        environment: LeasedEnvironment | None = None
        data = bytearray()
        async for request in requests:
            if environment is None:
                environment = find_owned(self.host, request.lease_id, call)
                environment.check_control(request.control_token)
            data += request.chunk
            if len(data) > MAX_JOB_BYTES:
                raise InvalidFieldError("chunk", f"the job is larger than {MAX_JOB_BYTES} bytes")
        if environment is None:
            raise InvalidFieldError("lease_id", "the stream ended before its first message")
        try:
            return environment, pb2.GradeJob.FromString(bytes(data))
        except DecodeError as error:
            raise InvalidFieldError("chunk", f"the chunks are not a GradeJob: {error}") from error


def _record_call(
    call: pb2.ToolCall,
    result: pb2.ToolResult,
    started_ns: int,
    known: Collection[str],
) -> None:
    # The policy invents names; series and trace spans are named from a closed set.
    name = call.name if call.name in known else "unknown"
    metrics.tool_seconds.labels(name).observe(result.wall_ms / 1000)
    if result.error:
        metrics.errors.labels(_KINDS[result.error]).inc()
    attributes: dict[str, str | bool | int] = {
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": call.call_id,
        "etude.tool.is_error": result.is_error,
        "etude.tool.cpu_ms": result.cpu_ms,
    }
    span = tracer.start_span(f"execute_tool {name}", start_time=started_ns, attributes=attributes)
    span.end(started_ns + result.wall_ms * 1_000_000)
