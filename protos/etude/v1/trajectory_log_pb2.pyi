from etude.v1 import environments_pb2 as _environments_pb2
from etude.v1 import routes_pb2 as _routes_pb2
from etude.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrajectoryPlace(_message.Message):
    __slots__ = ("epoch", "dispatch", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    dispatch: int
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., dispatch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class TrajectoryStart(_message.Message):
    __slots__ = ("lease", "carried")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    lease: _environments_pb2.Lease
    carried: int
    def __init__(self, lease: _Optional[_Union[_environments_pb2.Lease, _Mapping]] = ..., carried: _Optional[int] = ...) -> None: ...

class TrajectoryTurn(_message.Message):
    __slots__ = ("prompt_tokens", "prompt_digest", "token_ids", "logprobs", "spans", "is_cut", "seconds", "routes")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    prompt_digest: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[_weights_pb2.PolicySpan]
    is_cut: bool
    seconds: float
    routes: _routes_pb2.RoutedExperts
    def __init__(self, prompt_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[_weights_pb2.PolicySpan, _Mapping]]] = ..., is_cut: _Optional[bool] = ..., seconds: _Optional[float] = ..., routes: _Optional[_Union[_routes_pb2.RoutedExperts, _Mapping]] = ...) -> None: ...

class TrajectoryResults(_message.Message):
    __slots__ = ("calls", "results", "seconds")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[_environments_pb2.ToolCall]
    results: _containers.RepeatedCompositeFieldContainer[_environments_pb2.ToolResult]
    seconds: float
    def __init__(self, calls: _Optional[_Iterable[_Union[_environments_pb2.ToolCall, _Mapping]]] = ..., results: _Optional[_Iterable[_Union[_environments_pb2.ToolResult, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class TrajectoryChange(_message.Message):
    __slots__ = ("diff",)
    DIFF_FIELD_NUMBER: _ClassVar[int]
    diff: bytes
    def __init__(self, diff: _Optional[bytes] = ...) -> None: ...

class TrajectoryRecord(_message.Message):
    __slots__ = ("rollout_id", "group_id", "index", "place", "number", "active_seconds", "start", "turn", "results", "lease", "change")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    group_id: str
    index: int
    place: TrajectoryPlace
    number: int
    active_seconds: float
    start: TrajectoryStart
    turn: TrajectoryTurn
    results: TrajectoryResults
    lease: _environments_pb2.Lease
    change: TrajectoryChange
    def __init__(self, rollout_id: _Optional[str] = ..., group_id: _Optional[str] = ..., index: _Optional[int] = ..., place: _Optional[_Union[TrajectoryPlace, _Mapping]] = ..., number: _Optional[int] = ..., active_seconds: _Optional[float] = ..., start: _Optional[_Union[TrajectoryStart, _Mapping]] = ..., turn: _Optional[_Union[TrajectoryTurn, _Mapping]] = ..., results: _Optional[_Union[TrajectoryResults, _Mapping]] = ..., lease: _Optional[_Union[_environments_pb2.Lease, _Mapping]] = ..., change: _Optional[_Union[TrajectoryChange, _Mapping]] = ...) -> None: ...
