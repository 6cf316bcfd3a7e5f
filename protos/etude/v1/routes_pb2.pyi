from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RoutedExperts(_message.Message):
    __slots__ = ("start", "layers", "choices", "id_bytes", "ids")
    START_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    start: int
    layers: int
    choices: int
    id_bytes: int
    ids: bytes
    def __init__(self, start: _Optional[int] = ..., layers: _Optional[int] = ..., choices: _Optional[int] = ..., id_bytes: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class RolloutRoutes(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[RoutedExperts]
    def __init__(self, links: _Optional[_Iterable[_Union[RoutedExperts, _Mapping]]] = ...) -> None: ...

class RoutesReference(_message.Message):
    __slots__ = ("key", "digest", "size_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest: str
    size_bytes: int
    def __init__(self, key: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...
