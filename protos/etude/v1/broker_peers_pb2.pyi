from etude.v1 import environments_pb2 as _environments_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardLoad(_message.Message):
    __slots__ = ("shard", "free", "waiting", "held_by_run")
    class HeldByRunEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_RUN_FIELD_NUMBER: _ClassVar[int]
    shard: _environments_pb2.BrokerShard
    free: int
    waiting: int
    held_by_run: _containers.ScalarMap[str, int]
    def __init__(self, shard: _Optional[_Union[_environments_pb2.BrokerShard, _Mapping]] = ..., free: _Optional[int] = ..., waiting: _Optional[int] = ..., held_by_run: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ReportLoadRequest(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: ShardLoad
    def __init__(self, load: _Optional[_Union[ShardLoad, _Mapping]] = ...) -> None: ...

class ReportLoadResponse(_message.Message):
    __slots__ = ("load", "shards")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    load: ShardLoad
    shards: _containers.RepeatedCompositeFieldContainer[_environments_pb2.BrokerShard]
    def __init__(self, load: _Optional[_Union[ShardLoad, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[_environments_pb2.BrokerShard, _Mapping]]] = ...) -> None: ...

class FindBatchRequest(_message.Message):
    __slots__ = ("run_id", "idempotency_key", "snapshot_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    idempotency_key: str
    snapshot_id: str
    def __init__(self, run_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class FindBatchResponse(_message.Message):
    __slots__ = ("held", "has_snapshot")
    HELD_FIELD_NUMBER: _ClassVar[int]
    HAS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[_environments_pb2.HeldLease]
    has_snapshot: bool
    def __init__(self, held: _Optional[_Iterable[_Union[_environments_pb2.HeldLease, _Mapping]]] = ..., has_snapshot: _Optional[bool] = ...) -> None: ...

class ForwardLaunchRequest(_message.Message):
    __slots__ = ("launch", "indices", "wait_ms")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    launch: _environments_pb2.LaunchBatchRequest
    indices: _containers.RepeatedScalarFieldContainer[int]
    wait_ms: int
    def __init__(self, launch: _Optional[_Union[_environments_pb2.LaunchBatchRequest, _Mapping]] = ..., indices: _Optional[_Iterable[int]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ForwardLaunchResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _environments_pb2.LaunchBatchResponse
    def __init__(self, outcome: _Optional[_Union[_environments_pb2.LaunchBatchResponse, _Mapping]] = ...) -> None: ...

class ForwardRenewalRequest(_message.Message):
    __slots__ = ("renewal", "owner")
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    renewal: _environments_pb2.RenewLeasesRequest
    owner: str
    def __init__(self, renewal: _Optional[_Union[_environments_pb2.RenewLeasesRequest, _Mapping]] = ..., owner: _Optional[str] = ...) -> None: ...

class ForwardRenewalResponse(_message.Message):
    __slots__ = ("missing_lease_ids",)
    MISSING_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    missing_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ForwardReleaseRequest(_message.Message):
    __slots__ = ("release", "owner")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    release: _environments_pb2.ReleaseLeasesRequest
    owner: str
    def __init__(self, release: _Optional[_Union[_environments_pb2.ReleaseLeasesRequest, _Mapping]] = ..., owner: _Optional[str] = ...) -> None: ...

class ForwardReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardPlanRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _environments_pb2.ReportPlanRequest
    def __init__(self, report: _Optional[_Union[_environments_pb2.ReportPlanRequest, _Mapping]] = ...) -> None: ...

class ForwardPlanResponse(_message.Message):
    __slots__ = ("templates",)
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    templates: _containers.RepeatedCompositeFieldContainer[_environments_pb2.TemplateReady]
    def __init__(self, templates: _Optional[_Iterable[_Union[_environments_pb2.TemplateReady, _Mapping]]] = ...) -> None: ...

class ForwardGroupRequest(_message.Message):
    __slots__ = ("prepare",)
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    prepare: _environments_pb2.PrepareGroupRequest
    def __init__(self, prepare: _Optional[_Union[_environments_pb2.PrepareGroupRequest, _Mapping]] = ...) -> None: ...

class ForwardGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
