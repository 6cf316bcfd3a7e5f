from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseQuantile(_message.Message):
    __slots__ = ("share", "seconds")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    share: float
    seconds: float
    def __init__(self, share: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class Wave(_message.Message):
    __slots__ = ("pool", "template", "count", "start_s", "start_sigma_s", "lease_seconds", "with_image")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    START_SIGMA_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITH_IMAGE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    template: str
    count: int
    start_s: float
    start_sigma_s: float
    lease_seconds: _containers.RepeatedCompositeFieldContainer[LeaseQuantile]
    with_image: int
    def __init__(self, pool: _Optional[str] = ..., template: _Optional[str] = ..., count: _Optional[int] = ..., start_s: _Optional[float] = ..., start_sigma_s: _Optional[float] = ..., lease_seconds: _Optional[_Iterable[_Union[LeaseQuantile, _Mapping]]] = ..., with_image: _Optional[int] = ...) -> None: ...

class PlannedImage(_message.Message):
    __slots__ = ("template", "image")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    template: str
    image: str
    def __init__(self, template: _Optional[str] = ..., image: _Optional[str] = ...) -> None: ...

class RolloutPlan(_message.Message):
    __slots__ = ("version", "made_unix_ms", "valid_until_unix_ms", "waves", "images")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MADE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    VALID_UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    version: int
    made_unix_ms: int
    valid_until_unix_ms: int
    waves: _containers.RepeatedCompositeFieldContainer[Wave]
    images: _containers.RepeatedCompositeFieldContainer[PlannedImage]
    def __init__(self, version: _Optional[int] = ..., made_unix_ms: _Optional[int] = ..., valid_until_unix_ms: _Optional[int] = ..., waves: _Optional[_Iterable[_Union[Wave, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[PlannedImage, _Mapping]]] = ...) -> None: ...
