from etude.v1 import environments_pb2 as _environments_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_LOADING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_CHECKPOINTING: _ClassVar[RunState]
    RUN_STATE_EVALUATING: _ClassVar[RunState]
    RUN_STATE_DRAINING: _ClassVar[RunState]
    RUN_STATE_SUSPENDED: _ClassVar[RunState]
    RUN_STATE_DONE: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_LOADING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_CHECKPOINTING: RunState
RUN_STATE_EVALUATING: RunState
RUN_STATE_DRAINING: RunState
RUN_STATE_SUSPENDED: RunState
RUN_STATE_DONE: RunState
RUN_STATE_FAILED: RunState

class RolloutCounts(_message.Message):
    __slots__ = ("in_flight", "completed", "trained", "masked", "retried", "dropped")
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    in_flight: int
    completed: int
    trained: int
    masked: int
    retried: int
    dropped: int
    def __init__(self, in_flight: _Optional[int] = ..., completed: _Optional[int] = ..., trained: _Optional[int] = ..., masked: _Optional[int] = ..., retried: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class EnvironmentSummary(_message.Message):
    __slots__ = ("pool", "driver", "isolation", "leased")
    POOL_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    pool: str
    driver: str
    isolation: _environments_pb2.Isolation
    leased: int
    def __init__(self, pool: _Optional[str] = ..., driver: _Optional[str] = ..., isolation: _Optional[_Union[_environments_pb2.Isolation, str]] = ..., leased: _Optional[int] = ...) -> None: ...

class PhaseProgress(_message.Message):
    __slots__ = ("name", "step", "target_step", "is_done", "gate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TARGET_STEP_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    target_step: int
    is_done: bool
    gate: str
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., target_step: _Optional[int] = ..., is_done: _Optional[bool] = ..., gate: _Optional[str] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("state", "phase", "step", "target_step", "policy_version", "last_step_unix_ms", "reward_mean", "reward_ewma", "staleness_p50", "staleness_max", "rollouts", "productive_seconds", "step_seconds_p99", "observed_generation", "tokens_per_second", "eval_success", "environments", "loss", "reason", "message", "mismatch", "step_tokens", "wait_seconds", "work_seconds", "engines", "engine_limit", "phases", "step_seconds_p50", "lender_targets", "lent_engines")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TARGET_STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_EWMA_FIELD_NUMBER: _ClassVar[int]
    STALENESS_P50_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    PRODUCTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_P99_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EVAL_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_P50_FIELD_NUMBER: _ClassVar[int]
    LENDER_TARGETS_FIELD_NUMBER: _ClassVar[int]
    LENT_ENGINES_FIELD_NUMBER: _ClassVar[int]
    state: RunState
    phase: str
    step: int
    target_step: int
    policy_version: int
    last_step_unix_ms: int
    reward_mean: float
    reward_ewma: float
    staleness_p50: float
    staleness_max: float
    rollouts: RolloutCounts
    productive_seconds: float
    step_seconds_p99: float
    observed_generation: int
    tokens_per_second: float
    eval_success: float
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentSummary]
    loss: float
    reason: str
    message: str
    mismatch: float
    step_tokens: float
    wait_seconds: float
    work_seconds: float
    engines: int
    engine_limit: int
    phases: _containers.RepeatedCompositeFieldContainer[PhaseProgress]
    step_seconds_p50: float
    lender_targets: _containers.RepeatedScalarFieldContainer[str]
    lent_engines: int
    def __init__(self, state: _Optional[_Union[RunState, str]] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., target_step: _Optional[int] = ..., policy_version: _Optional[int] = ..., last_step_unix_ms: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_ewma: _Optional[float] = ..., staleness_p50: _Optional[float] = ..., staleness_max: _Optional[float] = ..., rollouts: _Optional[_Union[RolloutCounts, _Mapping]] = ..., productive_seconds: _Optional[float] = ..., step_seconds_p99: _Optional[float] = ..., observed_generation: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., eval_success: _Optional[float] = ..., environments: _Optional[_Iterable[_Union[EnvironmentSummary, _Mapping]]] = ..., loss: _Optional[float] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., mismatch: _Optional[float] = ..., step_tokens: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., work_seconds: _Optional[float] = ..., engines: _Optional[int] = ..., engine_limit: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[PhaseProgress, _Mapping]]] = ..., step_seconds_p50: _Optional[float] = ..., lender_targets: _Optional[_Iterable[str]] = ..., lent_engines: _Optional[int] = ...) -> None: ...

class CheckpointRecord(_message.Message):
    __slots__ = ("step", "policy_version", "reason", "uri", "manifest_digest", "size_bytes", "metrics", "keyframe", "request", "branch", "parent_digest", "parent_step")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    KEYFRAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    PARENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy_version: int
    reason: str
    uri: str
    manifest_digest: str
    size_bytes: int
    metrics: _containers.ScalarMap[str, str]
    keyframe: int
    request: str
    branch: int
    parent_digest: str
    parent_step: int
    def __init__(self, step: _Optional[int] = ..., policy_version: _Optional[int] = ..., reason: _Optional[str] = ..., uri: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., metrics: _Optional[_Mapping[str, str]] = ..., keyframe: _Optional[int] = ..., request: _Optional[str] = ..., branch: _Optional[int] = ..., parent_digest: _Optional[str] = ..., parent_step: _Optional[int] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("reason", "message", "warning")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    warning: bool
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., warning: _Optional[bool] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("epoch", "after_sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    after_sequence: int
    def __init__(self, epoch: _Optional[int] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("run_uid", "epoch", "sequence", "status", "checkpoint", "event")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    epoch: int
    sequence: int
    status: RunStatus
    checkpoint: CheckpointRecord
    event: RunEvent
    def __init__(self, run_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointRecord, _Mapping]] = ..., event: _Optional[_Union[RunEvent, _Mapping]] = ...) -> None: ...

class CheckpointNow(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class SuspendRun(_message.Message):
    __slots__ = ("checkpoint", "is_failure")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_FAILURE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: bool
    is_failure: bool
    def __init__(self, checkpoint: _Optional[bool] = ..., is_failure: _Optional[bool] = ...) -> None: ...

class ConfigureRun(_message.Message):
    __slots__ = ("spec_json", "generation")
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    generation: int
    def __init__(self, spec_json: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class DumpStacks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleEngines(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    def __init__(self, replicas: _Optional[int] = ...) -> None: ...

class SetLenders(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, targets: _Optional[_Iterable[str]] = ...) -> None: ...

class CommandRequest(_message.Message):
    __slots__ = ("command_id", "checkpoint", "suspend", "configure", "dump_stacks", "scale_engines", "set_lenders")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    DUMP_STACKS_FIELD_NUMBER: _ClassVar[int]
    SCALE_ENGINES_FIELD_NUMBER: _ClassVar[int]
    SET_LENDERS_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    checkpoint: CheckpointNow
    suspend: SuspendRun
    configure: ConfigureRun
    dump_stacks: DumpStacks
    scale_engines: ScaleEngines
    set_lenders: SetLenders
    def __init__(self, command_id: _Optional[str] = ..., checkpoint: _Optional[_Union[CheckpointNow, _Mapping]] = ..., suspend: _Optional[_Union[SuspendRun, _Mapping]] = ..., configure: _Optional[_Union[ConfigureRun, _Mapping]] = ..., dump_stacks: _Optional[_Union[DumpStacks, _Mapping]] = ..., scale_engines: _Optional[_Union[ScaleEngines, _Mapping]] = ..., set_lenders: _Optional[_Union[SetLenders, _Mapping]] = ...) -> None: ...

class CommandResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
