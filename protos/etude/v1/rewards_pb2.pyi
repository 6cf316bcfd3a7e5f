from etude.v1 import environments_pb2 as _environments_pb2
from etude.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("group_id", "task_uri", "pool", "rollouts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_URI_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    task_uri: str
    pool: str
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, group_id: _Optional[str] = ..., task_uri: _Optional[str] = ..., pool: _Optional[str] = ..., rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class RewardPart(_message.Message):
    __slots__ = ("name", "value", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    weight: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class RewardFault(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class RewardRecord(_message.Message):
    __slots__ = ("rollout_id", "reward", "fault", "parts", "success", "evidence")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    reward: float
    fault: RewardFault
    parts: _containers.RepeatedCompositeFieldContainer[RewardPart]
    success: float
    evidence: _environments_pb2.GradeEvidence
    def __init__(self, rollout_id: _Optional[str] = ..., reward: _Optional[float] = ..., fault: _Optional[_Union[RewardFault, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[RewardPart, _Mapping]]] = ..., success: _Optional[float] = ..., evidence: _Optional[_Union[_environments_pb2.GradeEvidence, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("records", "rubric_digest")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    RUBRIC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RewardRecord]
    rubric_digest: str
    def __init__(self, records: _Optional[_Iterable[_Union[RewardRecord, _Mapping]]] = ..., rubric_digest: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RubricFunction(_message.Message):
    __slots__ = ("name", "function", "version", "weight", "parameters_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    function: str
    version: str
    weight: float
    parameters_json: str
    def __init__(self, name: _Optional[str] = ..., function: _Optional[str] = ..., version: _Optional[str] = ..., weight: _Optional[float] = ..., parameters_json: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("functions", "rubric_digest")
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    RUBRIC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    functions: _containers.RepeatedCompositeFieldContainer[RubricFunction]
    rubric_digest: str
    def __init__(self, functions: _Optional[_Iterable[_Union[RubricFunction, _Mapping]]] = ..., rubric_digest: _Optional[str] = ...) -> None: ...
