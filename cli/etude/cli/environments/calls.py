"""Calls to brokers and nodes, and what their refusals mean to a person."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc

from etude.cli.environments.kept import Environment
from etude.common import channels
from etude.common.errors import Problem, UserError
from etude.v1 import environment_access_pb2_grpc, environments_pb2, environments_pb2_grpc

RUN_ID = "cli"
"""Leases of people count as those of one run."""
TOOLSET = "Standard"
_RENEWALS = 3
"""In the time of a lease."""

_REASONS = {
    grpc.StatusCode.UNAVAILABLE: (
        "Unreachable",
        "check that it runs and that the address is right",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("Unreachable", "try again; it may be busy"),
    grpc.StatusCode.NOT_FOUND: ("NotFound", "etude env ls shows the environments that are there"),
    grpc.StatusCode.PERMISSION_DENIED: ("PermissionDenied", "use an environment that is yours"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        "Full",
        "try again later, or etude env rm what you do not use",
    ),
    grpc.StatusCode.FAILED_PRECONDITION: ("FailedPrecondition", "put right what it says"),
    grpc.StatusCode.INVALID_ARGUMENT: ("InvalidArgument", "put right what it says"),
}


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn a refusal into a message in three parts.

    Raises:
        UserError: what was refused, and what to do.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        unknown = ("Internal", "look into the log of that process")
        reason, fix = _REASONS.get(error.code(), unknown)
        what = error.details() or error.code().name
        raise UserError(Problem(reason, what, where, fix)) from error


async def launch(
    broker: str, *, template: str, uri: str, ttl_s: int, queue_timeout_s: int
) -> Environment:
    """One new environment.

    Raises:
        UserError: there is none to be had.
    """
    request = environments_pb2.LaunchBatchRequest(
        run_id=RUN_ID,
        idempotency_key=uuid.uuid4().hex,
        template=template,
        workspace=environments_pb2.WorkspaceSource(uri=uri),
        count=1,
        toolset=TOOLSET,
        ttl_seconds=ttl_s,
        queue_timeout_seconds=queue_timeout_s,
    )
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        limit_s = queue_timeout_s + channels.CONTROL_DEADLINE_S
        with explained(f"broker {broker}"):
            async for outcome in stub.LaunchBatch(request, timeout=limit_s):
                return _granted(outcome, broker, template, ttl_s)
    what = "the broker ended the call without an answer"
    raise UserError(Problem("Unreachable", what, f"broker {broker}", "try again"))


def _granted(
    outcome: environments_pb2.LaunchBatchResponse, broker: str, template: str, ttl_s: int
) -> Environment:
    if not outcome.HasField("lease"):
        failure = outcome.failure
        fix = "put right what it says; etude env create --help shows the options"
        raise UserError(Problem(failure.reason, failure.message, f"broker {broker}", fix))
    return Environment(lease=outcome.lease, template=template, broker=broker, ttl_s=ttl_s)


async def release(broker: str, names: Sequence[str]) -> None:
    """End leases; those that have ended count as done."""
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=names)
        with explained(f"broker {broker}"):
            await stub.ReleaseLeases(request, timeout=channels.CONTROL_DEADLINE_S)


@contextlib.asynccontextmanager
async def opened(
    environment: Environment,
) -> AsyncIterator["environment_access_pb2_grpc.EnvAccessServiceAsyncStub"]:
    """The open door of an environment, whose lease is renewed meanwhile if it is ours."""
    async with channels.dial(environment.lease.endpoint) as channel:
        renewing = asyncio.create_task(_renew(environment), name="renew")
        try:
            with explained(f"environment {environment.name}"):
                yield environment_access_pb2_grpc.EnvAccessServiceStub(channel)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])


async def _renew(environment: Environment) -> None:
    if not environment.broker:
        return
    request = environments_pb2.RenewLeasesRequest(
        lease_ids=[environment.name], ttl_seconds=environment.ttl_s
    )
    async with channels.dial(environment.broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        while True:
            # A broker that starts again answers later; until then the lease has time left.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.RenewLeases(request, timeout=channels.CONTROL_DEADLINE_S)
            await asyncio.sleep(environment.ttl_s / _RENEWALS)
