"""Launch orders for hosts, and the outcomes for clients."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.common.pinned_images import is_pinned
from etude.envserver.broker.hosts import Hosts, HostState
from etude.envserver.broker.launch_queue import LaunchBatch, Turn
from etude.v1 import environments_pb2


@dataclass(slots=True, kw_only=True)
class LaunchOrder:
    """Environments of one batch for one host."""

    host: HostState
    batch: LaunchBatch
    label: str = ""
    """Of the broker, in the ids of its leases."""
    turns: list[Turn] = field(default_factory=list)

    @property
    def cpu_ms(self) -> float:
        """CPU time that it costs the host."""
        return sum(turn.offer.cpu_ms for turn in self.turns)

    def to_request(
        self, leases: Iterable[environments_pb2.HeldLease]
    ) -> environments_pb2.OpenEnvironmentsRequest:
        asked = self.batch.request
        return environments_pb2.OpenEnvironmentsRequest(
            leases=leases,
            node_id=self.host.node_id,
            template=asked.template,
            workspace=asked.workspace,
            toolset=asked.toolset,
            snapshot_id=asked.snapshot_id,
            on_expiry=asked.on_expiry,
            image=asked.image if is_pinned(asked.image) else "",
        )

    def new_leases(self, expires_unix_ms: int) -> list[environments_pb2.HeldLease]:
        """Make a lease for each of its environments."""
        return [self._lease(turn.position, expires_unix_ms) for turn in self.turns]

    def _lease(self, index: int, expires_unix_ms: int) -> environments_pb2.HeldLease:
        batch = self.batch
        return environments_pb2.HeldLease(
            lease=environments_pb2.Lease(
                lease_id=f"{batch.digest[:12]}-{index}-{secrets.token_hex(4)}-{self.label}",
                agent_token=secrets.token_urlsafe(16),
                control_token=secrets.token_urlsafe(16),
                expires_unix_ms=expires_unix_ms,
            ),
            idempotency_key=batch.key.idempotency_key,
            index=index,
            run_id=batch.key.run_id,
            request_digest=batch.digest,
            lease_class=batch.request.lease_class,
        )


def failure_of(batch: LaunchBatch, hosts: Hosts, *, now_s: float) -> tuple[str, str] | None:
    """Reason and text of a failure, for what waits too long or for a snapshot that is lost."""
    line = batch.placement_class
    if batch.deadline_s <= now_s:
        return "QueueTimeout", hosts.explain_no_host(line.template)
    if line.snapshot_id and not hosts.holders(batch.key.run_id, line.snapshot_id):
        return "SnapshotLost", f"no host holds snapshot {line.snapshot_id!r} any more"
    return None


def success_outcome(
    index: int, lease: environments_pb2.Lease
) -> environments_pb2.LaunchBatchResponse:
    """The outcome of an environment that is ready."""
    return environments_pb2.LaunchBatchResponse(index=index, lease=lease)


def failure_outcome(index: int, reason: str, message: str) -> environments_pb2.LaunchBatchResponse:
    """The outcome of a failed launch."""
    told = environments_pb2.LaunchFailure(reason=reason, message=message)
    return environments_pb2.LaunchBatchResponse(index=index, failure=told)
