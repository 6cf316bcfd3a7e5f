from etude.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Isolation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ISOLATION_UNSPECIFIED: _ClassVar[Isolation]
    ISOLATION_WEAK: _ClassVar[Isolation]
    ISOLATION_MODERATE: _ClassVar[Isolation]
    ISOLATION_STRONG: _ClassVar[Isolation]

class OnExpiry(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_EXPIRY_UNSPECIFIED: _ClassVar[OnExpiry]
    ON_EXPIRY_KILL: _ClassVar[OnExpiry]
    ON_EXPIRY_PAUSE: _ClassVar[OnExpiry]

class Start(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    START_UNSPECIFIED: _ClassVar[Start]
    START_COPY: _ClassVar[Start]
    START_SPAWN: _ClassVar[Start]
    START_SHELL: _ClassVar[Start]
    START_PAUSED_CLONE: _ClassVar[Start]
    START_DELTA: _ClassVar[Start]

class LeaseClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_CLASS_UNSPECIFIED: _ClassVar[LeaseClass]
    LEASE_CLASS_TRAINING: _ClassVar[LeaseClass]
    LEASE_CLASS_EVALUATION: _ClassVar[LeaseClass]
    LEASE_CLASS_GRADING: _ClassVar[LeaseClass]
    LEASE_CLASS_SERVING: _ClassVar[LeaseClass]

class ToolErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_ERROR_KIND_UNSPECIFIED: _ClassVar[ToolErrorKind]
    TOOL_ERROR_KIND_TOOL: _ClassVar[ToolErrorKind]
    TOOL_ERROR_KIND_TIMEOUT: _ClassVar[ToolErrorKind]
    TOOL_ERROR_KIND_INVALID: _ClassVar[ToolErrorKind]

class AccessKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_KIND_UNSPECIFIED: _ClassVar[AccessKind]
    ACCESS_KIND_READ: _ClassVar[AccessKind]
    ACCESS_KIND_WRITTEN: _ClassVar[AccessKind]
    ACCESS_KIND_DELETED: _ClassVar[AccessKind]
    ACCESS_KIND_STARTED: _ClassVar[AccessKind]

class GradeMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRADE_MODE_UNSPECIFIED: _ClassVar[GradeMode]
    GRADE_MODE_CLEAN: _ClassVar[GradeMode]
    GRADE_MODE_FORK: _ClassVar[GradeMode]
ISOLATION_UNSPECIFIED: Isolation
ISOLATION_WEAK: Isolation
ISOLATION_MODERATE: Isolation
ISOLATION_STRONG: Isolation
ON_EXPIRY_UNSPECIFIED: OnExpiry
ON_EXPIRY_KILL: OnExpiry
ON_EXPIRY_PAUSE: OnExpiry
START_UNSPECIFIED: Start
START_COPY: Start
START_SPAWN: Start
START_SHELL: Start
START_PAUSED_CLONE: Start
START_DELTA: Start
LEASE_CLASS_UNSPECIFIED: LeaseClass
LEASE_CLASS_TRAINING: LeaseClass
LEASE_CLASS_EVALUATION: LeaseClass
LEASE_CLASS_GRADING: LeaseClass
LEASE_CLASS_SERVING: LeaseClass
TOOL_ERROR_KIND_UNSPECIFIED: ToolErrorKind
TOOL_ERROR_KIND_TOOL: ToolErrorKind
TOOL_ERROR_KIND_TIMEOUT: ToolErrorKind
TOOL_ERROR_KIND_INVALID: ToolErrorKind
ACCESS_KIND_UNSPECIFIED: AccessKind
ACCESS_KIND_READ: AccessKind
ACCESS_KIND_WRITTEN: AccessKind
ACCESS_KIND_DELETED: AccessKind
ACCESS_KIND_STARTED: AccessKind
GRADE_MODE_UNSPECIFIED: GradeMode
GRADE_MODE_CLEAN: GradeMode
GRADE_MODE_FORK: GradeMode

class WorkspaceSource(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class Caps(_message.Message):
    __slots__ = ("files", "memory", "freeze", "portable", "egress")
    FILES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    PORTABLE_FIELD_NUMBER: _ClassVar[int]
    EGRESS_FIELD_NUMBER: _ClassVar[int]
    files: bool
    memory: bool
    freeze: bool
    portable: bool
    egress: bool
    def __init__(self, files: _Optional[bool] = ..., memory: _Optional[bool] = ..., freeze: _Optional[bool] = ..., portable: _Optional[bool] = ..., egress: _Optional[bool] = ...) -> None: ...

class LaunchBatchRequest(_message.Message):
    __slots__ = ("run_id", "idempotency_key", "template", "workspace", "count", "toolset", "ttl_seconds", "queue_timeout_seconds", "group_id", "snapshot_id", "deadline_unix_ms", "on_expiry", "image", "is_repeated", "lease_class")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOOLSET_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ON_EXPIRY_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    LEASE_CLASS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    idempotency_key: str
    template: str
    workspace: WorkspaceSource
    count: int
    toolset: str
    ttl_seconds: int
    queue_timeout_seconds: int
    group_id: str
    snapshot_id: str
    deadline_unix_ms: int
    on_expiry: OnExpiry
    image: str
    is_repeated: bool
    lease_class: LeaseClass
    def __init__(self, run_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., template: _Optional[str] = ..., workspace: _Optional[_Union[WorkspaceSource, _Mapping]] = ..., count: _Optional[int] = ..., toolset: _Optional[str] = ..., ttl_seconds: _Optional[int] = ..., queue_timeout_seconds: _Optional[int] = ..., group_id: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., deadline_unix_ms: _Optional[int] = ..., on_expiry: _Optional[_Union[OnExpiry, str]] = ..., image: _Optional[str] = ..., is_repeated: _Optional[bool] = ..., lease_class: _Optional[_Union[LeaseClass, str]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "endpoint", "agent_token", "control_token", "expires_unix_ms", "isolation", "driver", "queued_ms", "start_ms", "start", "caps")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    AGENT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CAPS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    endpoint: str
    agent_token: str
    control_token: str
    expires_unix_ms: int
    isolation: Isolation
    driver: str
    queued_ms: int
    start_ms: int
    start: Start
    caps: Caps
    def __init__(self, lease_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., agent_token: _Optional[str] = ..., control_token: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ..., isolation: _Optional[_Union[Isolation, str]] = ..., driver: _Optional[str] = ..., queued_ms: _Optional[int] = ..., start_ms: _Optional[int] = ..., start: _Optional[_Union[Start, str]] = ..., caps: _Optional[_Union[Caps, _Mapping]] = ...) -> None: ...

class LaunchFailure(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LaunchBatchResponse(_message.Message):
    __slots__ = ("index", "lease", "failure")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    index: int
    lease: Lease
    failure: LaunchFailure
    def __init__(self, index: _Optional[int] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., failure: _Optional[_Union[LaunchFailure, _Mapping]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("lease_ids", "ttl_seconds")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    ttl_seconds: int
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("missing_lease_ids",)
    MISSING_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    missing_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "endpoint", "driver", "isolation", "slots", "held", "draining", "levels", "free_memory_bytes", "queue_ms", "snapshots", "begun", "generation", "base_generation", "ended_lease_ids", "images", "unavailable", "pool_revision", "pulled_images", "moved_to", "can_preempt")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENDED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    POOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    PULLED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    CAN_PREEMPT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    endpoint: str
    driver: str
    isolation: Isolation
    slots: int
    held: _containers.RepeatedCompositeFieldContainer[HeldLease]
    draining: bool
    levels: _containers.RepeatedCompositeFieldContainer[TemplateLevel]
    free_memory_bytes: int
    queue_ms: int
    snapshots: _containers.RepeatedCompositeFieldContainer[HeldSnapshot]
    begun: _containers.RepeatedCompositeFieldContainer[Beginning]
    generation: int
    base_generation: int
    ended_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    images: _containers.RepeatedScalarFieldContainer[str]
    unavailable: str
    pool_revision: str
    pulled_images: _containers.RepeatedScalarFieldContainer[str]
    moved_to: str
    can_preempt: bool
    def __init__(self, node_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., driver: _Optional[str] = ..., isolation: _Optional[_Union[Isolation, str]] = ..., slots: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., draining: _Optional[bool] = ..., levels: _Optional[_Iterable[_Union[TemplateLevel, _Mapping]]] = ..., free_memory_bytes: _Optional[int] = ..., queue_ms: _Optional[int] = ..., snapshots: _Optional[_Iterable[_Union[HeldSnapshot, _Mapping]]] = ..., begun: _Optional[_Iterable[_Union[Beginning, _Mapping]]] = ..., generation: _Optional[int] = ..., base_generation: _Optional[int] = ..., ended_lease_ids: _Optional[_Iterable[str]] = ..., images: _Optional[_Iterable[str]] = ..., unavailable: _Optional[str] = ..., pool_revision: _Optional[str] = ..., pulled_images: _Optional[_Iterable[str]] = ..., moved_to: _Optional[str] = ..., can_preempt: _Optional[bool] = ...) -> None: ...

class BrokerShard(_message.Message):
    __slots__ = ("name", "target")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: str
    def __init__(self, name: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class Beginning(_message.Message):
    __slots__ = ("template", "start", "start_ms")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    template: str
    start: Start
    start_ms: int
    def __init__(self, template: _Optional[str] = ..., start: _Optional[_Union[Start, str]] = ..., start_ms: _Optional[int] = ...) -> None: ...

class TemplateLevel(_message.Message):
    __slots__ = ("template", "paused_clones", "shells", "resident", "spawn_cpu_ms", "start_p50_ms", "start_p90_ms", "quarantined")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_CLONES_FIELD_NUMBER: _ClassVar[int]
    SHELLS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SPAWN_CPU_MS_FIELD_NUMBER: _ClassVar[int]
    START_P50_MS_FIELD_NUMBER: _ClassVar[int]
    START_P90_MS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    template: str
    paused_clones: int
    shells: int
    resident: bool
    spawn_cpu_ms: int
    start_p50_ms: int
    start_p90_ms: int
    quarantined: str
    def __init__(self, template: _Optional[str] = ..., paused_clones: _Optional[int] = ..., shells: _Optional[int] = ..., resident: _Optional[bool] = ..., spawn_cpu_ms: _Optional[int] = ..., start_p50_ms: _Optional[int] = ..., start_p90_ms: _Optional[int] = ..., quarantined: _Optional[str] = ...) -> None: ...

class HeldSnapshot(_message.Message):
    __slots__ = ("snapshot_id", "run_id", "template")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    run_id: str
    template: str
    def __init__(self, snapshot_id: _Optional[str] = ..., run_id: _Optional[str] = ..., template: _Optional[str] = ...) -> None: ...

class WarmTarget(_message.Message):
    __slots__ = ("template", "paused_clones", "shells")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_CLONES_FIELD_NUMBER: _ClassVar[int]
    SHELLS_FIELD_NUMBER: _ClassVar[int]
    template: str
    paused_clones: int
    shells: int
    def __init__(self, template: _Optional[str] = ..., paused_clones: _Optional[int] = ..., shells: _Optional[int] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("lease", "idempotency_key", "index", "run_id", "request_digest", "lease_class", "preempted")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_CLASS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    idempotency_key: str
    index: int
    run_id: str
    request_digest: str
    lease_class: LeaseClass
    preempted: bool
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., index: _Optional[int] = ..., run_id: _Optional[str] = ..., request_digest: _Optional[str] = ..., lease_class: _Optional[_Union[LeaseClass, str]] = ..., preempted: _Optional[bool] = ...) -> None: ...

class LeaseExpiry(_message.Message):
    __slots__ = ("lease_id", "expires_unix_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    expires_unix_ms: int
    def __init__(self, lease_id: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("close_lease_ids", "renewed", "warm", "generation", "images", "shards", "pool_revision", "may_restart")
    CLOSE_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    POOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    MAY_RESTART_FIELD_NUMBER: _ClassVar[int]
    close_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    renewed: _containers.RepeatedCompositeFieldContainer[LeaseExpiry]
    warm: _containers.RepeatedCompositeFieldContainer[WarmTarget]
    generation: int
    images: _containers.RepeatedCompositeFieldContainer[_plan_pb2.PlannedImage]
    shards: _containers.RepeatedCompositeFieldContainer[BrokerShard]
    pool_revision: str
    may_restart: bool
    def __init__(self, close_lease_ids: _Optional[_Iterable[str]] = ..., renewed: _Optional[_Iterable[_Union[LeaseExpiry, _Mapping]]] = ..., warm: _Optional[_Iterable[_Union[WarmTarget, _Mapping]]] = ..., generation: _Optional[int] = ..., images: _Optional[_Iterable[_Union[_plan_pb2.PlannedImage, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[BrokerShard, _Mapping]]] = ..., pool_revision: _Optional[str] = ..., may_restart: _Optional[bool] = ...) -> None: ...

class DescribePoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribePoolResponse(_message.Message):
    __slots__ = ("pool_json", "revision")
    POOL_JSON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    pool_json: str
    revision: str
    def __init__(self, pool_json: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class GrantReadsRequest(_message.Message):
    __slots__ = ("uri", "keys", "after")
    URI_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    uri: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    after: str
    def __init__(self, uri: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., after: _Optional[str] = ...) -> None: ...

class ReadGrant(_message.Message):
    __slots__ = ("key", "size", "tag", "modified_unix_s", "url")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    key: str
    size: int
    tag: str
    modified_unix_s: int
    url: str
    def __init__(self, key: _Optional[str] = ..., size: _Optional[int] = ..., tag: _Optional[str] = ..., modified_unix_s: _Optional[int] = ..., url: _Optional[str] = ...) -> None: ...

class GrantReadsResponse(_message.Message):
    __slots__ = ("grants", "lifetime_seconds", "has_more")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[ReadGrant]
    lifetime_seconds: int
    has_more: bool
    def __init__(self, grants: _Optional[_Iterable[_Union[ReadGrant, _Mapping]]] = ..., lifetime_seconds: _Optional[int] = ..., has_more: _Optional[bool] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListShardsResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[BrokerShard]
    def __init__(self, shards: _Optional[_Iterable[_Union[BrokerShard, _Mapping]]] = ...) -> None: ...

class ReportPlanRequest(_message.Message):
    __slots__ = ("run_id", "plan")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    plan: _plan_pb2.RolloutPlan
    def __init__(self, run_id: _Optional[str] = ..., plan: _Optional[_Union[_plan_pb2.RolloutPlan, _Mapping]] = ...) -> None: ...

class TemplateReady(_message.Message):
    __slots__ = ("template", "ready_by_unix_ms")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    READY_BY_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    template: str
    ready_by_unix_ms: int
    def __init__(self, template: _Optional[str] = ..., ready_by_unix_ms: _Optional[int] = ...) -> None: ...

class ReportPlanResponse(_message.Message):
    __slots__ = ("templates",)
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    templates: _containers.RepeatedCompositeFieldContainer[TemplateReady]
    def __init__(self, templates: _Optional[_Iterable[_Union[TemplateReady, _Mapping]]] = ...) -> None: ...

class PrepareGroupRequest(_message.Message):
    __slots__ = ("run_id", "group_id", "template", "workspace", "count", "image")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_id: str
    template: str
    workspace: WorkspaceSource
    count: int
    image: str
    def __init__(self, run_id: _Optional[str] = ..., group_id: _Optional[str] = ..., template: _Optional[str] = ..., workspace: _Optional[_Union[WorkspaceSource, _Mapping]] = ..., count: _Optional[int] = ..., image: _Optional[str] = ...) -> None: ...

class PrepareGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenEnvironmentsRequest(_message.Message):
    __slots__ = ("leases", "template", "workspace", "toolset", "snapshot_id", "on_expiry", "image", "node_id")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    TOOLSET_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    ON_EXPIRY_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    template: str
    workspace: WorkspaceSource
    toolset: str
    snapshot_id: str
    on_expiry: OnExpiry
    image: str
    node_id: str
    def __init__(self, leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., template: _Optional[str] = ..., workspace: _Optional[_Union[WorkspaceSource, _Mapping]] = ..., toolset: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., on_expiry: _Optional[_Union[OnExpiry, str]] = ..., image: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class OpenEnvironmentsResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[LaunchBatchResponse]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[LaunchBatchResponse, _Mapping]]] = ...) -> None: ...

class CloseEnvironmentsRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseEnvironmentsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PreemptEnvironmentsRequest(_message.Message):
    __slots__ = ("lease_ids", "count")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    count: int
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ...) -> None: ...

class PreemptEnvironmentsResponse(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumePreemptedRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumePreemptedResponse(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("call_id", "name", "arguments_json")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    name: str
    arguments_json: str
    def __init__(self, call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class ToolResult(_message.Message):
    __slots__ = ("call_id", "content", "is_error", "error", "wall_ms", "cpu_ms", "omitted_bytes")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    CPU_MS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    content: bytes
    is_error: bool
    error: ToolErrorKind
    wall_ms: int
    cpu_ms: int
    omitted_bytes: int
    def __init__(self, call_id: _Optional[str] = ..., content: _Optional[bytes] = ..., is_error: _Optional[bool] = ..., error: _Optional[_Union[ToolErrorKind, str]] = ..., wall_ms: _Optional[int] = ..., cpu_ms: _Optional[int] = ..., omitted_bytes: _Optional[int] = ...) -> None: ...

class KnownCalls(_message.Message):
    __slots__ = ("call_ids",)
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    call_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, call_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RunTurnRequest(_message.Message):
    __slots__ = ("lease_id", "agent_token", "calls", "known_calls")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CALLS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    agent_token: str
    calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    known_calls: KnownCalls
    def __init__(self, lease_id: _Optional[str] = ..., agent_token: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., known_calls: _Optional[_Union[KnownCalls, _Mapping]] = ...) -> None: ...

class RunTurnResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ToolResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ToolResult, _Mapping]]] = ...) -> None: ...

class DiffRequest(_message.Message):
    __slots__ = ("lease_id", "control_token")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ...) -> None: ...

class DiffResponse(_message.Message):
    __slots__ = ("chunk", "too_large")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TOO_LARGE_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    too_large: str
    def __init__(self, chunk: _Optional[bytes] = ..., too_large: _Optional[str] = ...) -> None: ...

class WorkspaceFile(_message.Message):
    __slots__ = ("path", "content", "executable")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: bytes
    executable: bool
    def __init__(self, path: _Optional[str] = ..., content: _Optional[bytes] = ..., executable: _Optional[bool] = ...) -> None: ...

class WorkspaceDiff(_message.Message):
    __slots__ = ("written", "deleted", "accesses", "accesses_incomplete")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    ACCESSES_FIELD_NUMBER: _ClassVar[int]
    ACCESSES_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    written: _containers.RepeatedCompositeFieldContainer[WorkspaceFile]
    deleted: _containers.RepeatedScalarFieldContainer[str]
    accesses: _containers.RepeatedCompositeFieldContainer[AccessEvent]
    accesses_incomplete: bool
    def __init__(self, written: _Optional[_Iterable[_Union[WorkspaceFile, _Mapping]]] = ..., deleted: _Optional[_Iterable[str]] = ..., accesses: _Optional[_Iterable[_Union[AccessEvent, _Mapping]]] = ..., accesses_incomplete: _Optional[bool] = ...) -> None: ...

class AccessEvent(_message.Message):
    __slots__ = ("kind", "path")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    kind: AccessKind
    path: str
    def __init__(self, kind: _Optional[_Union[AccessKind, str]] = ..., path: _Optional[str] = ...) -> None: ...

class GradeRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "chunk")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    chunk: bytes
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GradeEvidence(_message.Message):
    __slots__ = ("mode", "driver", "isolation")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    mode: GradeMode
    driver: str
    isolation: Isolation
    def __init__(self, mode: _Optional[_Union[GradeMode, str]] = ..., driver: _Optional[str] = ..., isolation: _Optional[_Union[Isolation, str]] = ...) -> None: ...

class GradeJob(_message.Message):
    __slots__ = ("diff", "artefacts", "files", "command", "timeout_seconds", "reward_path", "mode", "environment", "protected_paths", "allowed_paths")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIFF_FIELD_NUMBER: _ClassVar[int]
    ARTEFACTS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REWARD_PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_PATHS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_PATHS_FIELD_NUMBER: _ClassVar[int]
    diff: WorkspaceDiff
    artefacts: _containers.RepeatedScalarFieldContainer[str]
    files: _containers.RepeatedCompositeFieldContainer[WorkspaceFile]
    command: str
    timeout_seconds: int
    reward_path: str
    mode: GradeMode
    environment: _containers.ScalarMap[str, str]
    protected_paths: _containers.RepeatedScalarFieldContainer[str]
    allowed_paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, diff: _Optional[_Union[WorkspaceDiff, _Mapping]] = ..., artefacts: _Optional[_Iterable[str]] = ..., files: _Optional[_Iterable[_Union[WorkspaceFile, _Mapping]]] = ..., command: _Optional[str] = ..., timeout_seconds: _Optional[int] = ..., reward_path: _Optional[str] = ..., mode: _Optional[_Union[GradeMode, str]] = ..., environment: _Optional[_Mapping[str, str]] = ..., protected_paths: _Optional[_Iterable[str]] = ..., allowed_paths: _Optional[_Iterable[str]] = ...) -> None: ...

class GradeResponse(_message.Message):
    __slots__ = ("exit_code", "output", "reward_file", "timed_out", "evidence")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FILE_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    output: bytes
    reward_file: bytes
    timed_out: bool
    evidence: GradeEvidence
    def __init__(self, exit_code: _Optional[int] = ..., output: _Optional[bytes] = ..., reward_file: _Optional[bytes] = ..., timed_out: _Optional[bool] = ..., evidence: _Optional[_Union[GradeEvidence, _Mapping]] = ...) -> None: ...

class WatchPoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPoolResponse(_message.Message):
    __slots__ = ("sequence", "nodes", "slots", "leased", "waiting", "granted_total", "expired_total", "driver", "isolation", "acquire_p50_ms", "acquire_p99_ms", "opening", "ready", "planned", "warm_percent", "start_p50_ms", "start_p95_ms", "lease_p50_seconds", "lease_p95_seconds", "told_unix_ms", "members", "held", "plans", "lease_seconds", "first_starts", "leased_by_run", "problems", "pool_revision", "preempted", "unpreemptible_nodes", "reserved")
    class LeasedByRunEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_P50_MS_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_P99_MS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    WARM_PERCENT_FIELD_NUMBER: _ClassVar[int]
    START_P50_MS_FIELD_NUMBER: _ClassVar[int]
    START_P95_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_P95_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOLD_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STARTS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BY_RUN_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    POOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    UNPREEMPTIBLE_NODES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    nodes: int
    slots: int
    leased: int
    waiting: int
    granted_total: int
    expired_total: int
    driver: str
    isolation: Isolation
    acquire_p50_ms: int
    acquire_p99_ms: int
    opening: int
    ready: int
    planned: int
    warm_percent: int
    start_p50_ms: int
    start_p95_ms: int
    lease_p50_seconds: int
    lease_p95_seconds: int
    told_unix_ms: int
    members: _containers.RepeatedCompositeFieldContainer[NodeFigures]
    held: _containers.RepeatedCompositeFieldContainer[HeldFigures]
    plans: _containers.RepeatedCompositeFieldContainer[PlanFigures]
    lease_seconds: _containers.RepeatedCompositeFieldContainer[_plan_pb2.LeaseQuantile]
    first_starts: _containers.RepeatedCompositeFieldContainer[FirstStarts]
    leased_by_run: _containers.ScalarMap[str, int]
    problems: _containers.RepeatedCompositeFieldContainer[NodeProblem]
    pool_revision: str
    preempted: int
    unpreemptible_nodes: int
    reserved: int
    def __init__(self, sequence: _Optional[int] = ..., nodes: _Optional[int] = ..., slots: _Optional[int] = ..., leased: _Optional[int] = ..., waiting: _Optional[int] = ..., granted_total: _Optional[int] = ..., expired_total: _Optional[int] = ..., driver: _Optional[str] = ..., isolation: _Optional[_Union[Isolation, str]] = ..., acquire_p50_ms: _Optional[int] = ..., acquire_p99_ms: _Optional[int] = ..., opening: _Optional[int] = ..., ready: _Optional[int] = ..., planned: _Optional[int] = ..., warm_percent: _Optional[int] = ..., start_p50_ms: _Optional[int] = ..., start_p95_ms: _Optional[int] = ..., lease_p50_seconds: _Optional[int] = ..., lease_p95_seconds: _Optional[int] = ..., told_unix_ms: _Optional[int] = ..., members: _Optional[_Iterable[_Union[NodeFigures, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[HeldFigures, _Mapping]]] = ..., plans: _Optional[_Iterable[_Union[PlanFigures, _Mapping]]] = ..., lease_seconds: _Optional[_Iterable[_Union[_plan_pb2.LeaseQuantile, _Mapping]]] = ..., first_starts: _Optional[_Iterable[_Union[FirstStarts, _Mapping]]] = ..., leased_by_run: _Optional[_Mapping[str, int]] = ..., problems: _Optional[_Iterable[_Union[NodeProblem, _Mapping]]] = ..., pool_revision: _Optional[str] = ..., preempted: _Optional[int] = ..., unpreemptible_nodes: _Optional[int] = ..., reserved: _Optional[int] = ...) -> None: ...

class NodeProblem(_message.Message):
    __slots__ = ("node_id", "message")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    message: str
    def __init__(self, node_id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class UpdatePoolRequest(_message.Message):
    __slots__ = ("pool_json",)
    POOL_JSON_FIELD_NUMBER: _ClassVar[int]
    pool_json: str
    def __init__(self, pool_json: _Optional[str] = ...) -> None: ...

class UpdatePoolResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: str
    def __init__(self, revision: _Optional[str] = ...) -> None: ...

class NodeFigures(_message.Message):
    __slots__ = ("node_id", "held", "idle_since_unix_ms", "cached", "vacating")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    IDLE_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    VACATING_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    held: int
    idle_since_unix_ms: int
    cached: bool
    vacating: bool
    def __init__(self, node_id: _Optional[str] = ..., held: _Optional[int] = ..., idle_since_unix_ms: _Optional[int] = ..., cached: _Optional[bool] = ..., vacating: _Optional[bool] = ...) -> None: ...

class FirstStarts(_message.Message):
    __slots__ = ("template", "count", "p50_ms", "p95_ms")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P95_MS_FIELD_NUMBER: _ClassVar[int]
    template: str
    count: int
    p50_ms: int
    p95_ms: int
    def __init__(self, template: _Optional[str] = ..., count: _Optional[int] = ..., p50_ms: _Optional[int] = ..., p95_ms: _Optional[int] = ...) -> None: ...

class HeldFigures(_message.Message):
    __slots__ = ("template", "count", "since_unix_ms")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    template: str
    count: int
    since_unix_ms: int
    def __init__(self, template: _Optional[str] = ..., count: _Optional[int] = ..., since_unix_ms: _Optional[int] = ...) -> None: ...

class PlannedWave(_message.Message):
    __slots__ = ("template", "count", "start_unix_ms", "start_sigma_s", "lease_seconds")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    START_SIGMA_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    template: str
    count: int
    start_unix_ms: int
    start_sigma_s: float
    lease_seconds: _containers.RepeatedCompositeFieldContainer[_plan_pb2.LeaseQuantile]
    def __init__(self, template: _Optional[str] = ..., count: _Optional[int] = ..., start_unix_ms: _Optional[int] = ..., start_sigma_s: _Optional[float] = ..., lease_seconds: _Optional[_Iterable[_Union[_plan_pb2.LeaseQuantile, _Mapping]]] = ...) -> None: ...

class PlanFigures(_message.Message):
    __slots__ = ("run_id", "version", "heard_unix_ms", "until_unix_ms", "ratio", "waves")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARD_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    heard_unix_ms: int
    until_unix_ms: int
    ratio: float
    waves: _containers.RepeatedCompositeFieldContainer[PlannedWave]
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., heard_unix_ms: _Optional[int] = ..., until_unix_ms: _Optional[int] = ..., ratio: _Optional[float] = ..., waves: _Optional[_Iterable[_Union[PlannedWave, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_ids", "hold_seconds")
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    hold_seconds: int
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ..., hold_seconds: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("empty_node_ids",)
    EMPTY_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    empty_node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, empty_node_ids: _Optional[_Iterable[str]] = ...) -> None: ...
