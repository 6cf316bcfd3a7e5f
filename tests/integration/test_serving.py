"""A real server and a real channel: limits, health, rich errors."""

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from typing_extensions import override

from etude.common.errors import FullError, InvalidFieldError, UnknownIdError
from etude.common.rpc.channels import dial
from etude.common.rpc.server import Server
from etude.v1 import rewards_pb2, rewards_pb2_grpc

NAME = "etude.v1.RewardService"


class Moody(rewards_pb2_grpc.RewardServiceServicer):
    """Fails in the way that the group id asks for."""

    @override
    async def Score(
        self,
        request: rewards_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[rewards_pb2.ScoreRequest, rewards_pb2.ScoreResponse],
    ) -> rewards_pb2.ScoreResponse:
        match request.group_id:
            case "field":
                raise InvalidFieldError("task_uri", "must not be empty")
            case "full":
                raise FullError("4 of 4 slots taken", retry_after_s=1.5)
            case "unknown":
                raise UnknownIdError("no such group")
            case "bug":
                raise RuntimeError("a secret detail")
            case _:
                return rewards_pb2.ScoreResponse(rubric_digest="d")

    @override
    async def Describe(
        self,
        request: rewards_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[
            rewards_pb2.DescribeRequest, rewards_pb2.DescribeResponse
        ],
    ) -> rewards_pb2.DescribeResponse:
        return rewards_pb2.DescribeResponse()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server(service_names=[NAME])
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(Moody(), running.grpc_server)
    await running.start()
    yield running
    await running.stop(0)


async def failure(server: Server, group_id: str) -> grpc.aio.AioRpcError:
    async with dial(f"127.0.0.1:{server.port}") as channel:
        stub = rewards_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(rewards_pb2.ScoreRequest(group_id=group_id), timeout=5)
        return caught.value


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    # The stubs know the synchronous call only; both carry the same metadata.
    status = rpc_status.from_call(cast("grpc.Call", error))
    assert status is not None
    found: dict[str, Any] = {}
    for box in status.details:
        for kind in (
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
            error_details_pb2.ErrorInfo,
        ):
            if box.Is(kind.DESCRIPTOR):
                message = kind()
                box.Unpack(message)
                found[kind.DESCRIPTOR.name] = message
    return found


async def test_a_bad_field_is_named(server: Server) -> None:
    error = await failure(server, "field")
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    violation = details(error)["BadRequest"].field_violations[0]
    assert (violation.field, violation.description) == ("task_uri", "must not be empty")


async def test_a_full_server_says_when_to_come_back(server: Server) -> None:
    error = await failure(server, "full")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() == 1500


async def test_an_unknown_id_is_not_found(server: Server) -> None:
    assert (await failure(server, "unknown")).code() == grpc.StatusCode.NOT_FOUND


async def test_our_own_bug_shows_an_incident_and_no_detail(server: Server) -> None:
    error = await failure(server, "bug")
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert "incident" in (error.details() or "")


async def test_health_follows_readiness(server: Server) -> None:
    async with dial(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=NAME)
        serving = health_pb2.HealthCheckResponse
        assert (await stub.Check(request, timeout=5)).status == serving.NOT_SERVING
        await server.set_ready()
        assert (await stub.Check(request, timeout=5)).status == serving.SERVING


async def test_a_port_in_use_is_an_error_that_names_it(server: Server) -> None:
    second = Server(service_names=[NAME], port=server.port)
    with pytest.raises(OSError, match=str(server.port)):
        await second.start()


async def test_a_message_over_the_limit_is_refused_with_the_limit(server: Server) -> None:
    async with dial(f"127.0.0.1:{server.port}") as channel:
        stub = rewards_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(rewards_pb2.ScoreRequest(task_uri="x" * (4 << 20)), timeout=5)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(4 << 20) in (caught.value.details() or "")
