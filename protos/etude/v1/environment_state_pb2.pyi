from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "snapshot_id", "with_memory", "ttl_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    snapshot_id: str
    with_memory: bool
    ttl_seconds: int
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., with_memory: _Optional[bool] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("snapshot_id", "size_bytes", "digest", "expires_unix_ms", "has_memory")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    HAS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    size_bytes: int
    digest: str
    expires_unix_ms: int
    has_memory: bool
    def __init__(self, snapshot_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ..., has_memory: _Optional[bool] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "snapshot_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    snapshot_id: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("lease_id", "control_token")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "ttl_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    ttl_seconds: int
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("expires_unix_ms",)
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    expires_unix_ms: int
    def __init__(self, expires_unix_ms: _Optional[int] = ...) -> None: ...

class DropSnapshotsRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "snapshot_ids")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    snapshot_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., snapshot_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DropSnapshotsResponse(_message.Message):
    __slots__ = ("missing_snapshot_ids",)
    MISSING_SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    missing_snapshot_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing_snapshot_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "snapshot_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    snapshot_id: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class ShareResponse(_message.Message):
    __slots__ = ("digest", "size_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size_bytes: int
    def __init__(self, digest: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "snapshot_id", "shared_snapshot_id", "digest")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SHARED_SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    snapshot_id: str
    shared_snapshot_id: str
    digest: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., shared_snapshot_id: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetUpRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "commands", "timeout_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    commands: _containers.RepeatedScalarFieldContainer[str]
    timeout_seconds: int
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., commands: _Optional[_Iterable[str]] = ..., timeout_seconds: _Optional[int] = ...) -> None: ...

class SetUpResponse(_message.Message):
    __slots__ = ("succeeded", "exit_code", "output", "timed_out")
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    succeeded: int
    exit_code: int
    output: bytes
    timed_out: bool
    def __init__(self, succeeded: _Optional[int] = ..., exit_code: _Optional[int] = ..., output: _Optional[bytes] = ..., timed_out: _Optional[bool] = ...) -> None: ...
