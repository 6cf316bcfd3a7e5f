"""Client of brokers and hosts, with their refusals as problems for people."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from etude.cli import runs
from etude.cli.environments.lease_store import EnvironmentLease
from etude.common.errors import Problem, UserError
from etude.common.rpc import channels
from etude.common.run_folder.lock import is_running
from etude.common.run_folder.state import LocalPod, LocalState, read_state
from etude.v1 import (
    environment_access_pb2_grpc,
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

RUN_ID = "cli"
"""Run of all leases that people take."""
TOOLSET = "Standard"
_STATE_S = 120.0
"""Deadline of a snapshot, a rollback or a fetch."""
_RENEWALS = 3
"""Renewals in the life of a lease."""

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
    grpc.StatusCode.ALREADY_EXISTS: ("Conflict", "take another name"),
    grpc.StatusCode.DATA_LOSS: ("Corrupt", "take another snapshot, or a new environment"),
    grpc.StatusCode.INVALID_ARGUMENT: ("InvalidArgument", "put right what it says"),
}


@contextlib.contextmanager
def problems_of_calls(where: str) -> Iterator[None]:
    """Turn a gRPC error into a message in three parts.

    Raises:
        UserError: the call was refused.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        unknown = ("Internal", "look into the log of that process")
        reason, fix = _REASONS.get(error.code(), unknown)
        what = error.details() or error.code().name
        raise UserError(Problem(reason, what, where, fix)) from error


class EnvironmentRequest(NamedTuple):
    """Request for environments of a broker."""

    template: str
    ttl_s: int
    wait_s: int
    """For free places."""
    uri: str = ""
    """First files, where there is no snapshot."""
    snapshot_id: str = ""
    number: int = 1
    toolset: str = TOOLSET


async def launch_environments(broker: str, wish: EnvironmentRequest) -> list[EnvironmentLease]:
    """Launch environments.

    Raises:
        UserError: some could not be launched; the others are released.
    """
    request = environments_pb2.LaunchBatchRequest(
        run_id=RUN_ID,
        idempotency_key=uuid.uuid4().hex,
        template=wish.template,
        workspace=environments_pb2.WorkspaceSource(uri=wish.uri),
        count=wish.number,
        toolset=wish.toolset,
        ttl_seconds=wish.ttl_s,
        queue_timeout_seconds=wish.wait_s,
        snapshot_id=wish.snapshot_id,
    )
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        limit_s = wish.wait_s + channels.CONTROL_DEADLINE_S
        with problems_of_calls(f"broker {broker}"):
            outcomes = [each async for each in stub.LaunchBatch(request, timeout=limit_s)]
    made = [
        EnvironmentLease(
            lease=outcome.lease, template=wish.template, broker=broker, ttl_s=wish.ttl_s
        )
        for outcome in outcomes
        if outcome.HasField("lease")
    ]
    for failure in (outcome.failure for outcome in outcomes if outcome.HasField("failure")):
        await release_leases(broker, [environment.name for environment in made])
        fix = "put right what it says; etude env create --help shows the options"
        raise UserError(Problem(failure.reason, failure.message, f"broker {broker}", fix))
    return made


def make_snapshot_id(environment: EnvironmentLease, snapshot: str) -> str:
    """The id of a snapshot, unique among the snapshots of all people."""
    return f"{environment.name}-{snapshot}"


@contextlib.asynccontextmanager
async def _state_service(
    environment: EnvironmentLease,
) -> AsyncIterator["environment_state_pb2_grpc.EnvStateServiceAsyncStub"]:
    async with channels.dial(environment.lease.endpoint) as channel:
        with problems_of_calls(f"environment {environment.name}"):
            yield environment_state_pb2_grpc.EnvStateServiceStub(channel)


async def save_snapshot(environment: EnvironmentLease, name: str) -> int:
    """Save an environment, which goes on; returns the size in bytes."""
    snapshot_id = make_snapshot_id(environment, name)
    request = environment_state_pb2.SnapshotRequest(**_key(environment), snapshot_id=snapshot_id)
    async with _state_service(environment) as stub:
        return (await stub.Snapshot(request, timeout=_STATE_S)).size_bytes


async def share_snapshot(environment: EnvironmentLease, name: str) -> str:
    """Copy a snapshot to the pool's store; returns the reference for restore_shared()."""
    snapshot_id = make_snapshot_id(environment, name)
    request = environment_state_pb2.ShareRequest(**_key(environment), snapshot_id=snapshot_id)
    async with _state_service(environment) as stub:
        shared = await stub.Share(request, timeout=_STATE_S)
    return f"{snapshot_id}@{shared.digest}"


async def restore_shared(environment: EnvironmentLease, reference: str) -> None:
    """Load a shared snapshot into an environment.

    Raises:
        UserError: no such snapshot was shared, or it does not fit.
    """
    shared, at, digest = reference.rpartition("@")
    if not at:
        fix = "give what etude env snapshot --share printed"
        raise UserError(Problem("Usage", "is not a shared snapshot", reference, fix))
    key = _key(environment)
    snapshot_id = make_snapshot_id(environment, f"from-{uuid.uuid4().hex[:12]}")
    fetch = environment_state_pb2.FetchRequest(
        **key, snapshot_id=snapshot_id, shared_snapshot_id=shared, digest=digest
    )
    back = environment_state_pb2.RollbackRequest(**key, snapshot_id=snapshot_id)
    async with _state_service(environment) as stub:
        await stub.Fetch(fetch, timeout=_STATE_S)
        await stub.Rollback(back, timeout=_STATE_S)


async def roll_back(environment: EnvironmentLease, name: str) -> None:
    """Roll an environment back to one of its snapshots."""
    snapshot_id = make_snapshot_id(environment, name)
    request = environment_state_pb2.RollbackRequest(**_key(environment), snapshot_id=snapshot_id)
    async with _state_service(environment) as stub:
        await stub.Rollback(request, timeout=_STATE_S)


def _key(environment: EnvironmentLease) -> dict[str, Any]:
    lease = environment.lease
    return {"lease_id": lease.lease_id, "control_token": lease.control_token}


async def release_leases(broker: str, names: Sequence[str]) -> None:
    """End leases; those that have ended count as done."""
    async with channels.dial(broker) as channel:
        stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=names)
        with problems_of_calls(f"broker {broker}"):
            await stub.ReleaseLeases(request, timeout=channels.CONTROL_DEADLINE_S)


@contextlib.asynccontextmanager
async def access_environment(
    environment: EnvironmentLease,
) -> AsyncIterator["environment_access_pb2_grpc.EnvAccessServiceAsyncStub"]:
    """Stub of an environment's access service; the lease is renewed meanwhile if it is ours."""
    async with channels.dial(environment.lease.endpoint) as channel:
        renewing = asyncio.create_task(renew_lease(environment), name="renew")
        try:
            with problems_of_calls(f"environment {environment.name}"):
                yield environment_access_pb2_grpc.EnvAccessServiceStub(channel)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])


async def renew_lease(environment: EnvironmentLease) -> None:
    """Renew a lease until the task is cancelled; one that is not ours is left alone."""
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


_ADDRESS = re.compile(r"[A-Za-z0-9][-A-Za-z0-9.]*:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}")


class PoolBroker(NamedTuple):
    """A broker and the names of its templates."""

    broker: str
    templates: tuple[str, ...]
    """Empty if only the broker's address is known."""

    def choose_template(self, pool: str) -> str:
        """The only template of the pool.

        Raises:
            UserError: it is not clear which one.
        """
        if len(self.templates) == 1:
            return self.templates[0]
        there = f": it has {', '.join(self.templates)}" if self.templates else ""
        what = f"which template is not clear{there}"
        raise UserError(Problem("Usage", what, pool, "give --template NAME"))


def find_pool(where: str, name: str = "") -> PoolBroker:
    """The pool behind a run's name or folder, or behind host:port.

    Args:
        where: a run, or an address.
        name: of the pool, where a run has several.

    Raises:
        UserError: there is no such run, it does not run, or has no such pool.
    """
    if _ADDRESS.fullmatch(where):
        return PoolBroker(where, ())
    folder = runs.folder_of(where)
    state = read_state(folder)
    if state is None or not is_running(folder):
        fix = f"start it: etude run {folder / 'run.yaml'} --dir {folder}"
        raise UserError(Problem("Unreachable", "this run is not running", str(folder), fix))
    ready = [pod for pod in state.pods if pod.role == "broker" and "grpc" in pod.ports]
    found = [pod for pod in ready if pod.name.startswith(name)]
    if len(found) != 1:
        names = ", ".join(pod.name for pod in ready) or "none yet"
        fix = f"name one of its pools: {names}"
        raise UserError(Problem("NotFound", f"no pool {name!r} to choose", str(folder), fix))
    return PoolBroker(f"127.0.0.1:{found[0].ports['grpc']}", _templates(state, found[0]))


def _templates(state: LocalState, broker: LocalPod) -> tuple[str, ...]:
    for pool in state.pools:
        match pool:
            case {"metadata": {"name": str(name)}, "spec": {"templates": list(templates)}} if (
                broker.name.startswith(name)
            ):
                return tuple(str(each["name"]) for each in templates if isinstance(each, dict))
    return ()
