from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class IssueCertificateRequest(_message.Message):
    __slots__ = ("signing_request", "identity", "token")
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    signing_request: bytes
    identity: str
    token: str
    def __init__(self, signing_request: _Optional[bytes] = ..., identity: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class IssueCertificateResponse(_message.Message):
    __slots__ = ("certificate", "trust")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    trust: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., trust: _Optional[bytes] = ...) -> None: ...
