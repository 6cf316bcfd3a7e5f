from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

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

class RoutesReference(_message.Message):
    __slots__ = ("key", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest: str
    def __init__(self, key: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...
