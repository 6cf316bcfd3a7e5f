from etude.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContentObject(_message.Message):
    __slots__ = ("key", "num_bytes", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: str
    num_bytes: int
    digest: bytes
    def __init__(self, key: _Optional[str] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class LinkSize(_message.Message):
    __slots__ = ("tokens", "sampled")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    sampled: int
    def __init__(self, tokens: _Optional[int] = ..., sampled: _Optional[int] = ...) -> None: ...

class VersionUse(_message.Message):
    __slots__ = ("sampled", "context", "replica", "tokens")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sampled: _weights_pb2.PolicyVersion
    context: _weights_pb2.PolicyVersion
    replica: str
    tokens: int
    def __init__(self, sampled: _Optional[_Union[_weights_pb2.PolicyVersion, _Mapping]] = ..., context: _Optional[_Union[_weights_pb2.PolicyVersion, _Mapping]] = ..., replica: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class CallFigures(_message.Message):
    __slots__ = ("calls", "errors", "turns", "malformed", "tools", "edits", "failed_edits", "changes", "looks_before_edit", "has_read_before_edit", "has_tests_after_edit", "has_edits_after_failed_test", "asks_question", "addresses_judge")
    class ToolsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    EDITS_FIELD_NUMBER: _ClassVar[int]
    FAILED_EDITS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LOOKS_BEFORE_EDIT_FIELD_NUMBER: _ClassVar[int]
    HAS_READ_BEFORE_EDIT_FIELD_NUMBER: _ClassVar[int]
    HAS_TESTS_AFTER_EDIT_FIELD_NUMBER: _ClassVar[int]
    HAS_EDITS_AFTER_FAILED_TEST_FIELD_NUMBER: _ClassVar[int]
    ASKS_QUESTION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_JUDGE_FIELD_NUMBER: _ClassVar[int]
    calls: int
    errors: int
    turns: int
    malformed: int
    tools: _containers.ScalarMap[str, int]
    edits: int
    failed_edits: int
    changes: int
    looks_before_edit: int
    has_read_before_edit: bool
    has_tests_after_edit: bool
    has_edits_after_failed_test: bool
    asks_question: bool
    addresses_judge: bool
    def __init__(self, calls: _Optional[int] = ..., errors: _Optional[int] = ..., turns: _Optional[int] = ..., malformed: _Optional[int] = ..., tools: _Optional[_Mapping[str, int]] = ..., edits: _Optional[int] = ..., failed_edits: _Optional[int] = ..., changes: _Optional[int] = ..., looks_before_edit: _Optional[int] = ..., has_read_before_edit: _Optional[bool] = ..., has_tests_after_edit: _Optional[bool] = ..., has_edits_after_failed_test: _Optional[bool] = ..., asks_question: _Optional[bool] = ..., addresses_judge: _Optional[bool] = ...) -> None: ...

class RolloutContent(_message.Message):
    __slots__ = ("tokens", "links", "uses", "calls", "figures")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    tokens: ContentObject
    links: _containers.RepeatedCompositeFieldContainer[LinkSize]
    uses: _containers.RepeatedCompositeFieldContainer[VersionUse]
    calls: ContentObject
    figures: CallFigures
    def __init__(self, tokens: _Optional[_Union[ContentObject, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkSize, _Mapping]]] = ..., uses: _Optional[_Iterable[_Union[VersionUse, _Mapping]]] = ..., calls: _Optional[_Union[ContentObject, _Mapping]] = ..., figures: _Optional[_Union[CallFigures, _Mapping]] = ...) -> None: ...
