from etude.v1 import routes_pb2 as _routes_pb2
from etude.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ending(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENDING_UNSPECIFIED: _ClassVar[Ending]
    ENDING_STOPPED: _ClassVar[Ending]
    ENDING_LENGTH_LIMIT: _ClassVar[Ending]
    ENDING_TURN_LIMIT: _ClassVar[Ending]
    ENDING_TIME_LIMIT: _ClassVar[Ending]
    ENDING_POLICY_FAULT: _ClassVar[Ending]
    ENDING_PLATFORM_FAULT: _ClassVar[Ending]
    ENDING_CHANGE_TOO_LARGE: _ClassVar[Ending]
ENDING_UNSPECIFIED: Ending
ENDING_STOPPED: Ending
ENDING_LENGTH_LIMIT: Ending
ENDING_TURN_LIMIT: Ending
ENDING_TIME_LIMIT: Ending
ENDING_POLICY_FAULT: Ending
ENDING_PLATFORM_FAULT: Ending
ENDING_CHANGE_TOO_LARGE: Ending

class Link(_message.Message):
    __slots__ = ("token_ids", "loss_mask", "sampler_logprobs", "spans", "routes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    loss_mask: bytes
    sampler_logprobs: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[_weights_pb2.PolicySpan]
    routes: _routes_pb2.RoutesReference
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., loss_mask: _Optional[bytes] = ..., sampler_logprobs: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[_weights_pb2.PolicySpan, _Mapping]]] = ..., routes: _Optional[_Union[_routes_pb2.RoutesReference, _Mapping]] = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("completion_tokens", "tool_output_tokens", "tool_calls", "malformed_calls", "turns", "tool_seconds", "token_seconds", "prompt_tokens", "thinking_tokens", "final_message_tokens", "summary_tokens")
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_CALLS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TOOL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_MESSAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    completion_tokens: int
    tool_output_tokens: int
    tool_calls: int
    malformed_calls: int
    turns: int
    tool_seconds: float
    token_seconds: float
    prompt_tokens: int
    thinking_tokens: int
    final_message_tokens: int
    summary_tokens: int
    def __init__(self, completion_tokens: _Optional[int] = ..., tool_output_tokens: _Optional[int] = ..., tool_calls: _Optional[int] = ..., malformed_calls: _Optional[int] = ..., turns: _Optional[int] = ..., tool_seconds: _Optional[float] = ..., token_seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., thinking_tokens: _Optional[int] = ..., final_message_tokens: _Optional[int] = ..., summary_tokens: _Optional[int] = ...) -> None: ...

class CallRecord(_message.Message):
    __slots__ = ("turn", "name", "arguments_json", "result", "is_error", "is_malformed")
    TURN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_MALFORMED_FIELD_NUMBER: _ClassVar[int]
    turn: int
    name: str
    arguments_json: str
    result: str
    is_error: bool
    is_malformed: bool
    def __init__(self, turn: _Optional[int] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., result: _Optional[str] = ..., is_error: _Optional[bool] = ..., is_malformed: _Optional[bool] = ...) -> None: ...

class RolloutStep(_message.Message):
    __slots__ = ("name", "diff")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    name: str
    diff: bytes
    def __init__(self, name: _Optional[str] = ..., diff: _Optional[bytes] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("rollout_id", "group_id", "task_id", "index", "seed", "links", "costs", "ending", "fault", "final_message", "calls", "diff", "oldest", "newest", "trace_id", "span_id", "snapshot_id", "steps")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    group_id: str
    task_id: str
    index: int
    seed: int
    links: _containers.RepeatedCompositeFieldContainer[Link]
    costs: Costs
    ending: Ending
    fault: str
    final_message: str
    calls: _containers.RepeatedCompositeFieldContainer[CallRecord]
    diff: bytes
    oldest: _weights_pb2.PolicyVersion
    newest: _weights_pb2.PolicyVersion
    trace_id: str
    span_id: str
    snapshot_id: str
    steps: _containers.RepeatedCompositeFieldContainer[RolloutStep]
    def __init__(self, rollout_id: _Optional[str] = ..., group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., index: _Optional[int] = ..., seed: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., ending: _Optional[_Union[Ending, str]] = ..., fault: _Optional[str] = ..., final_message: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[CallRecord, _Mapping]]] = ..., diff: _Optional[bytes] = ..., oldest: _Optional[_Union[_weights_pb2.PolicyVersion, _Mapping]] = ..., newest: _Optional[_Union[_weights_pb2.PolicyVersion, _Mapping]] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[RolloutStep, _Mapping]]] = ...) -> None: ...
