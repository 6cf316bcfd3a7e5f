from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_LOADING: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_CATCHING_UP: _ClassVar[ReplicaState]
    REPLICA_STATE_NOT_READY: _ClassVar[ReplicaState]

class LendingState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LENDING_STATE_UNSPECIFIED: _ClassVar[LendingState]
    LENDING_STATE_SERVING: _ClassVar[LendingState]
    LENDING_STATE_EMPTYING: _ClassVar[LendingState]
    LENDING_STATE_LENT: _ClassVar[LendingState]
    LENDING_STATE_RETURNING: _ClassVar[LendingState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_LOADING: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_CATCHING_UP: ReplicaState
REPLICA_STATE_NOT_READY: ReplicaState
LENDING_STATE_UNSPECIFIED: LendingState
LENDING_STATE_SERVING: LendingState
LENDING_STATE_EMPTYING: LendingState
LENDING_STATE_LENT: LendingState
LENDING_STATE_RETURNING: LendingState

class PolicyVersion(_message.Message):
    __slots__ = ("epoch", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class PolicySpan(_message.Message):
    __slots__ = ("sampled", "context", "start", "end", "replica")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    sampled: PolicyVersion
    context: PolicyVersion
    start: int
    end: int
    replica: str
    def __init__(self, sampled: _Optional[_Union[PolicyVersion, _Mapping]] = ..., context: _Optional[_Union[PolicyVersion, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., replica: _Optional[str] = ...) -> None: ...

class WeightStatus(_message.Message):
    __slots__ = ("replica", "state", "live", "manifest_sha256", "last_pause_seconds", "last_commit_seconds", "reason", "message", "staged", "target", "state_digest", "undo_depth", "suspect_since", "lending", "user_turns", "user_turns_peak", "observed_seconds")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    LAST_PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNDO_DEPTH_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_SINCE_FIELD_NUMBER: _ClassVar[int]
    LENDING_FIELD_NUMBER: _ClassVar[int]
    USER_TURNS_FIELD_NUMBER: _ClassVar[int]
    USER_TURNS_PEAK_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: ReplicaState
    live: PolicyVersion
    manifest_sha256: bytes
    last_pause_seconds: float
    last_commit_seconds: float
    reason: str
    message: str
    staged: PolicyVersion
    target: PolicyVersion
    state_digest: bytes
    undo_depth: int
    suspect_since: PolicyVersion
    lending: LendingState
    user_turns: int
    user_turns_peak: int
    observed_seconds: float
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., live: _Optional[_Union[PolicyVersion, _Mapping]] = ..., manifest_sha256: _Optional[bytes] = ..., last_pause_seconds: _Optional[float] = ..., last_commit_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., staged: _Optional[_Union[PolicyVersion, _Mapping]] = ..., target: _Optional[_Union[PolicyVersion, _Mapping]] = ..., state_digest: _Optional[bytes] = ..., undo_depth: _Optional[int] = ..., suspect_since: _Optional[_Union[PolicyVersion, _Mapping]] = ..., lending: _Optional[_Union[LendingState, str]] = ..., user_turns: _Optional[int] = ..., user_turns_peak: _Optional[int] = ..., observed_seconds: _Optional[float] = ...) -> None: ...

class GetWeightStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...

class WatchWeightStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWeightStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...

class CommitVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: PolicyVersion
    def __init__(self, version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class CommitVersionResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...

class AnnounceVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: PolicyVersion
    def __init__(self, version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class AnnounceVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: PolicyVersion
    def __init__(self, version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class StageVersionResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...

class RollbackVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: PolicyVersion
    def __init__(self, version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class RollbackVersionResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...

class SetTargetRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: PolicyVersion
    def __init__(self, version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class SetTargetResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...

class SetLendingRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: int
    def __init__(self, seconds: _Optional[int] = ...) -> None: ...

class SetLendingResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WeightStatus
    def __init__(self, status: _Optional[_Union[WeightStatus, _Mapping]] = ...) -> None: ...
