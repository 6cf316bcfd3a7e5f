from etude.v1 import rewards_pb2 as _rewards_pb2
from etude.v1 import rollout_pb2 as _rollout_pb2
from etude.v1 import rollout_content_pb2 as _rollout_content_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalPlace(_message.Message):
    __slots__ = ("branch", "step")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    branch: int
    step: int
    def __init__(self, branch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class JournalBranch(_message.Message):
    __slots__ = ("number", "path")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    number: int
    path: _containers.RepeatedCompositeFieldContainer[JournalPlace]
    def __init__(self, number: _Optional[int] = ..., path: _Optional[_Iterable[_Union[JournalPlace, _Mapping]]] = ...) -> None: ...

class JournalOpen(_message.Message):
    __slots__ = ("run_uid", "epoch", "previous_epoch", "previous_sequence", "config_digest", "branch")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    epoch: int
    previous_epoch: int
    previous_sequence: int
    config_digest: str
    branch: JournalBranch
    def __init__(self, run_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., previous_epoch: _Optional[int] = ..., previous_sequence: _Optional[int] = ..., config_digest: _Optional[str] = ..., branch: _Optional[_Union[JournalBranch, _Mapping]] = ...) -> None: ...

class JournalAdmit(_message.Message):
    __slots__ = ("group_id", "phase", "position", "task_id", "seed", "serving")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    phase: str
    position: int
    task_id: str
    seed: int
    serving: int
    def __init__(self, group_id: _Optional[str] = ..., phase: _Optional[str] = ..., position: _Optional[int] = ..., task_id: _Optional[str] = ..., seed: _Optional[int] = ..., serving: _Optional[int] = ...) -> None: ...

class JournalRollout(_message.Message):
    __slots__ = ("rollout", "reward", "content")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    reward: _rewards_pb2.RewardRecord
    content: _rollout_content_pb2.RolloutContent
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., reward: _Optional[_Union[_rewards_pb2.RewardRecord, _Mapping]] = ..., content: _Optional[_Union[_rollout_content_pb2.RolloutContent, _Mapping]] = ...) -> None: ...

class JournalDrop(_message.Message):
    __slots__ = ("group_id", "rollout_id", "reason")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    rollout_id: str
    reason: str
    def __init__(self, group_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class JournalRestart(_message.Message):
    __slots__ = ("group_id", "serving")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    serving: int
    def __init__(self, group_id: _Optional[str] = ..., serving: _Optional[int] = ...) -> None: ...

class JournalPenalty(_message.Message):
    __slots__ = ("rollout_id", "amount", "monitor")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    MONITOR_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    amount: float
    monitor: str
    def __init__(self, rollout_id: _Optional[str] = ..., amount: _Optional[float] = ..., monitor: _Optional[str] = ...) -> None: ...

class JournalBatch(_message.Message):
    __slots__ = ("phase", "step", "group_ids", "penalties")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    PENALTIES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    step: int
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    penalties: _containers.RepeatedCompositeFieldContainer[JournalPenalty]
    def __init__(self, phase: _Optional[str] = ..., step: _Optional[int] = ..., group_ids: _Optional[_Iterable[str]] = ..., penalties: _Optional[_Iterable[_Union[JournalPenalty, _Mapping]]] = ...) -> None: ...

class JournalFreeze(_message.Message):
    __slots__ = ("phase", "step", "monitor", "sentence")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MONITOR_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    step: int
    monitor: str
    sentence: str
    def __init__(self, phase: _Optional[str] = ..., step: _Optional[int] = ..., monitor: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class JournalStep(_message.Message):
    __slots__ = ("phase", "step", "loss", "grad_norm", "weight_digest", "data_cursor")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_CURSOR_FIELD_NUMBER: _ClassVar[int]
    phase: str
    step: int
    loss: float
    grad_norm: float
    weight_digest: str
    data_cursor: str
    def __init__(self, phase: _Optional[str] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., grad_norm: _Optional[float] = ..., weight_digest: _Optional[str] = ..., data_cursor: _Optional[str] = ...) -> None: ...

class JournalPublished(_message.Message):
    __slots__ = ("epoch", "number", "step", "manifest_sha256")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    step: int
    manifest_sha256: str
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class JournalCheckpoint(_message.Message):
    __slots__ = ("step", "uri", "manifest_digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    uri: str
    manifest_digest: str
    def __init__(self, step: _Optional[int] = ..., uri: _Optional[str] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class JournalPart(_message.Message):
    __slots__ = ("number", "count", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    count: int
    data: bytes
    def __init__(self, number: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class JournalRecord(_message.Message):
    __slots__ = ("sequence", "open", "admit", "rollout", "drop", "batch", "step", "published", "checkpoint", "part", "freeze", "restart")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    open: JournalOpen
    admit: JournalAdmit
    rollout: JournalRollout
    drop: JournalDrop
    batch: JournalBatch
    step: JournalStep
    published: JournalPublished
    checkpoint: JournalCheckpoint
    part: JournalPart
    freeze: JournalFreeze
    restart: JournalRestart
    def __init__(self, sequence: _Optional[int] = ..., open: _Optional[_Union[JournalOpen, _Mapping]] = ..., admit: _Optional[_Union[JournalAdmit, _Mapping]] = ..., rollout: _Optional[_Union[JournalRollout, _Mapping]] = ..., drop: _Optional[_Union[JournalDrop, _Mapping]] = ..., batch: _Optional[_Union[JournalBatch, _Mapping]] = ..., step: _Optional[_Union[JournalStep, _Mapping]] = ..., published: _Optional[_Union[JournalPublished, _Mapping]] = ..., checkpoint: _Optional[_Union[JournalCheckpoint, _Mapping]] = ..., part: _Optional[_Union[JournalPart, _Mapping]] = ..., freeze: _Optional[_Union[JournalFreeze, _Mapping]] = ..., restart: _Optional[_Union[JournalRestart, _Mapping]] = ...) -> None: ...
