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

class RolloutContent(_message.Message):
    __slots__ = ("tokens", "links", "uses")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    tokens: ContentObject
    links: _containers.RepeatedCompositeFieldContainer[LinkSize]
    uses: _containers.RepeatedCompositeFieldContainer[VersionUse]
    def __init__(self, tokens: _Optional[_Union[ContentObject, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkSize, _Mapping]]] = ..., uses: _Optional[_Iterable[_Union[VersionUse, _Mapping]]] = ...) -> None: ...
