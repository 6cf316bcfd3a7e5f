from etude.v1 import inference_pb2 as _inference_pb2
from etude.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TurnRecord(_message.Message):
    __slots__ = ("turn_id", "rollout_id", "branch", "parent_branch", "compaction_of", "tenant", "user", "consent", "arm", "experiment", "is_side", "time_unix_nanos", "config_hash", "num_prefix_tokens", "prompt_token_ids", "token_ids", "logprobs", "spans", "finish_reason", "temperature", "num_calls", "num_broken_calls", "asks_question", "user_digest", "sealed", "withheld", "run_uid")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    PARENT_BRANCH_FIELD_NUMBER: _ClassVar[int]
    COMPACTION_OF_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    IS_SIDE_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_NANOS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_BROKEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    ASKS_QUESTION_FIELD_NUMBER: _ClassVar[int]
    USER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    rollout_id: str
    branch: str
    parent_branch: str
    compaction_of: str
    tenant: str
    user: str
    consent: str
    arm: str
    experiment: str
    is_side: bool
    time_unix_nanos: int
    config_hash: bytes
    num_prefix_tokens: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[_weights_pb2.PolicySpan]
    finish_reason: _inference_pb2.FinishReason
    temperature: float
    num_calls: int
    num_broken_calls: int
    asks_question: bool
    user_digest: str
    sealed: SealedTokens
    withheld: WithheldTokens
    run_uid: str
    def __init__(self, turn_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., branch: _Optional[str] = ..., parent_branch: _Optional[str] = ..., compaction_of: _Optional[str] = ..., tenant: _Optional[str] = ..., user: _Optional[str] = ..., consent: _Optional[str] = ..., arm: _Optional[str] = ..., experiment: _Optional[str] = ..., is_side: _Optional[bool] = ..., time_unix_nanos: _Optional[int] = ..., config_hash: _Optional[bytes] = ..., num_prefix_tokens: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[_weights_pb2.PolicySpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., temperature: _Optional[float] = ..., num_calls: _Optional[int] = ..., num_broken_calls: _Optional[int] = ..., asks_question: _Optional[bool] = ..., user_digest: _Optional[str] = ..., sealed: _Optional[_Union[SealedTokens, _Mapping]] = ..., withheld: _Optional[_Union[WithheldTokens, _Mapping]] = ..., run_uid: _Optional[str] = ...) -> None: ...

class WithheldTokens(_message.Message):
    __slots__ = ("rules", "num_tokens")
    RULES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedScalarFieldContainer[str]
    num_tokens: int
    def __init__(self, rules: _Optional[_Iterable[str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TurnTokens(_message.Message):
    __slots__ = ("prompt_token_ids", "token_ids", "logprobs")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SealedTokens(_message.Message):
    __slots__ = ("key_generation", "writer_key", "nonce", "ciphertext", "num_tokens")
    KEY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WRITER_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key_generation: int
    writer_key: bytes
    nonce: bytes
    ciphertext: bytes
    num_tokens: int
    def __init__(self, key_generation: _Optional[int] = ..., writer_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., ciphertext: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TurnSegment(_message.Message):
    __slots__ = ("writer", "first", "turns")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    writer: str
    first: int
    turns: _containers.RepeatedCompositeFieldContainer[TurnRecord]
    def __init__(self, writer: _Optional[str] = ..., first: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[TurnRecord, _Mapping]]] = ...) -> None: ...

class GetTurnKeyRequest(_message.Message):
    __slots__ = ("tenant", "user")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user: str
    def __init__(self, tenant: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class GetTurnKeyResponse(_message.Message):
    __slots__ = ("user_digest", "key_generation", "public_key")
    USER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    user_digest: str
    key_generation: int
    public_key: bytes
    def __init__(self, user_digest: _Optional[str] = ..., key_generation: _Optional[int] = ..., public_key: _Optional[bytes] = ...) -> None: ...
