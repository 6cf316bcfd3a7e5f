"""Status of a replica: health, live version, and the reason if it does not serve."""

from dataclasses import dataclass
from enum import Enum

from etude.common.weights import VersionId
from etude.v1 import weights_pb2


class ReplicaState(Enum):
    """State of a replica with respect to the weights."""

    LOADING = weights_pb2.REPLICA_STATE_LOADING
    SERVING = weights_pb2.REPLICA_STATE_SERVING
    CATCHING_UP = weights_pb2.REPLICA_STATE_CATCHING_UP
    NOT_READY = weights_pb2.REPLICA_STATE_NOT_READY


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Versions of a replica, and the reason if it does not serve."""

    replica: str
    state: ReplicaState = ReplicaState.LOADING
    live: VersionId | None = None
    manifest_sha256: bytes = b""
    last_pause_s: float = 0.0
    last_commit_s: float = 0.0
    """Fetch, verify and activate."""
    reason: str = ""
    message: str = ""
    staged: VersionId | None = None
    """Prepared on all ranks, but not live."""
    target: VersionId | None = None
    """Pinned; None follows the newest version."""
    state_digest: bytes = b""
    undo_depth: int = 0
    """Versions that can be undone without reading the store."""
    suspect_since: VersionId | None = None
    """Set once an audit found damage: the version of the last one that did not."""

    @property
    def is_ready(self) -> bool:
        """True while a verified version is served (health of the replica)."""
        return self.state in {ReplicaState.SERVING, ReplicaState.CATCHING_UP}

    def to_proto(self) -> weights_pb2.WeightStatus:
        """This status on the wire."""
        return weights_pb2.WeightStatus(
            replica=self.replica,
            state=self.state.value,
            live=self.live.to_proto() if self.live else None,
            manifest_sha256=self.manifest_sha256,
            last_pause_seconds=self.last_pause_s,
            last_commit_seconds=self.last_commit_s,
            reason=self.reason,
            message=self.message,
            staged=self.staged.to_proto() if self.staged else None,
            target=self.target.to_proto() if self.target else None,
            state_digest=self.state_digest,
            undo_depth=self.undo_depth,
            suspect_since=self.suspect_since.to_proto() if self.suspect_since else None,
        )
