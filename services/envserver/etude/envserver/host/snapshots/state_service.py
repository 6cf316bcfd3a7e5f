"""RPCs on the state of a host's environments, for the holders of their control tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from typing_extensions import override

from etude.common.errors import InvalidFieldError, UnknownIdError
from etude.common.tls.lease_owner import require_owner
from etude.common.tls.policy import AuthenticatedCall
from etude.envserver.host import task_setup
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.host.owned_leases import find_owned
from etude.envserver.host.snapshots.environment_state import origin_of
from etude.envserver.host.snapshots.snapshot_record import LocalSnapshot
from etude.envserver.host.snapshots.snapshot_store import (
    NoSnapshotStoreError,
    SharedSnapshotRef,
    SnapshotStore,
)
from etude.v1 import environment_state_pb2 as pb2
from etude.v1 import environment_state_pb2_grpc

RESUMED_S = 120
"""Default life of a resumed lease: holders renew every 15 s."""
MAX_TTL_S = 86_400
"""Longest life of a lease."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[_Request, _Response]


@dataclass(slots=True)
class StateService(environment_state_pb2_grpc.EnvStateServiceServicer):
    """Translates between the wire and the host."""

    host: Host
    store: SnapshotStore | None = None
    """Store of shared snapshots, if the pool has one."""

    @override
    async def SetUp(
        self, request: pb2.SetUpRequest, context: Context[pb2.SetUpRequest, pb2.SetUpResponse]
    ) -> pb2.SetUpResponse:
        environment = self._controlled(request.lease_id, request.control_token, context)
        done = await task_setup.set_up(
            self.host.states,
            environment,
            request.commands,
            timeout_s=float(request.timeout_seconds),
        )
        return pb2.SetUpResponse(
            succeeded=done.succeeded,
            exit_code=done.exit_code,
            output=done.output,
            timed_out=done.timed_out,
        )

    @override
    async def Snapshot(
        self,
        request: pb2.SnapshotRequest,
        context: Context[pb2.SnapshotRequest, pb2.SnapshotResponse],
    ) -> pb2.SnapshotResponse:
        environment = self._controlled(request.lease_id, request.control_token, context)
        states = self.host.states
        made = await states.snapshot(
            environment,
            request.snapshot_id,
            with_memory=request.with_memory,
            ttl_s=request.ttl_seconds or math.inf,
        )
        return pb2.SnapshotResponse(
            snapshot_id=made.snapshot_id,
            size_bytes=made.saved.num_bytes,
            digest=made.saved.digest,
            expires_unix_ms=states.snapshots.expires_unix_ms(made),
            has_memory=made.has_memory,
        )

    @override
    async def Rollback(
        self,
        request: pb2.RollbackRequest,
        context: Context[pb2.RollbackRequest, pb2.RollbackResponse],
    ) -> pb2.RollbackResponse:
        environment = self._controlled(request.lease_id, request.control_token, context)
        await self.host.states.rollback(environment, request.snapshot_id)
        return pb2.RollbackResponse()

    @override
    async def Pause(
        self, request: pb2.PauseRequest, context: Context[pb2.PauseRequest, pb2.PauseResponse]
    ) -> pb2.PauseResponse:
        environment = self._controlled(request.lease_id, request.control_token, context)
        await self.host.states.pause(environment)
        return pb2.PauseResponse()

    @override
    async def Resume(
        self, request: pb2.ResumeRequest, context: Context[pb2.ResumeRequest, pb2.ResumeResponse]
    ) -> pb2.ResumeResponse:
        if request.ttl_seconds > MAX_TTL_S:
            raise InvalidFieldError("ttl_seconds", f"must be at most {MAX_TTL_S}")
        kept = self.host.expired_leases.get(request.lease_id)
        if kept is None:
            find_owned(self.host, request.lease_id, context)
        else:
            require_owner(context, request.lease_id, kept.record.held.run_id)
        expires_unix_ms = await self.host.resume(
            request.lease_id, request.control_token, ttl_s=request.ttl_seconds or RESUMED_S
        )
        return pb2.ResumeResponse(expires_unix_ms=expires_unix_ms)

    @override
    async def DropSnapshots(
        self,
        request: pb2.DropSnapshotsRequest,
        context: Context[pb2.DropSnapshotsRequest, pb2.DropSnapshotsResponse],
    ) -> pb2.DropSnapshotsResponse:
        try:
            environment = self._controlled(request.lease_id, request.control_token, context)
        except UnknownIdError:
            held = self.host.states.snapshots.of_lease(request.lease_id, request.control_token)
            if not held:
                raise
            require_owner(context, request.lease_id, held[0].origin.run_id)
            return await self._drop_of_ended(held, request.snapshot_ids)
        missing = []
        for snapshot_id in request.snapshot_ids:
            try:
                await self.host.states.drop(environment, snapshot_id)
            except UnknownIdError:
                missing.append(snapshot_id)
            await self._drop_shared(environment.record.held.run_id, snapshot_id)
        return pb2.DropSnapshotsResponse(missing_snapshot_ids=missing)

    @override
    async def Share(
        self, request: pb2.ShareRequest, context: Context[pb2.ShareRequest, pb2.ShareResponse]
    ) -> pb2.ShareResponse:
        whose = origin_of(self._controlled(request.lease_id, request.control_token, context))
        snapshots = self.host.states.snapshots
        found = snapshots.find(whose.run_id, request.snapshot_id, lease_id=whose.lease_id)
        shared = await self._require_store().share(snapshots, found)
        return pb2.ShareResponse(digest=shared.digest, size_bytes=shared.num_bytes)

    @override
    async def Fetch(
        self, request: pb2.FetchRequest, context: Context[pb2.FetchRequest, pb2.FetchResponse]
    ) -> pb2.FetchResponse:
        whose = origin_of(self._controlled(request.lease_id, request.control_token, context))
        wanted = SharedSnapshotRef(request.shared_snapshot_id, request.digest)
        snapshots = self.host.states.snapshots
        await self._require_store().fetch(snapshots, whose, wanted, request.snapshot_id)
        return pb2.FetchResponse()

    async def _drop_of_ended(
        self, held: Sequence[LocalSnapshot], snapshot_ids: Sequence[str]
    ) -> pb2.DropSnapshotsResponse:
        """Remove some of the snapshots that an ended lease has left."""
        for each in held:
            if each.snapshot_id in snapshot_ids:
                await self.host.states.snapshots.drop(each)
                await self._drop_shared(each.origin.run_id, each.snapshot_id)
        missing = set(snapshot_ids) - {each.snapshot_id for each in held}
        return pb2.DropSnapshotsResponse(missing_snapshot_ids=sorted(missing))

    async def _drop_shared(self, run_id: str, snapshot_id: str) -> None:
        if self.store is not None:
            await self.store.remove(run_id, snapshot_id)

    def _require_store(self) -> SnapshotStore:
        """The store of shared snapshots.

        Raises:
            NoSnapshotStoreError: the pool has none.
        """
        if self.store is None:
            raise NoSnapshotStoreError("this pool has no snapshot store: set spec.snapshotsUri")
        return self.store

    def _controlled(self, lease_id: str, token: str, call: AuthenticatedCall) -> LeasedEnvironment:
        environment = find_owned(self.host, lease_id, call)
        environment.check_control(token)
        return environment
