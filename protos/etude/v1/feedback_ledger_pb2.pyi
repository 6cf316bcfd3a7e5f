from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedbackOpen(_message.Message):
    __slots__ = ("ledger_uid", "epoch", "previous_epoch", "previous_sequence")
    LEDGER_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ledger_uid: str
    epoch: int
    previous_epoch: int
    previous_sequence: int
    def __init__(self, ledger_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., previous_epoch: _Optional[int] = ..., previous_sequence: _Optional[int] = ...) -> None: ...

class FeedbackEventRecord(_message.Message):
    __slots__ = ("tenant", "user_digest", "key_generation", "event_digest", "content_digest", "kind", "received_ms", "nonce", "ciphertext", "num_redactions")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    EVENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_REDACTIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user_digest: str
    key_generation: int
    event_digest: bytes
    content_digest: bytes
    kind: str
    received_ms: int
    nonce: bytes
    ciphertext: bytes
    num_redactions: int
    def __init__(self, tenant: _Optional[str] = ..., user_digest: _Optional[str] = ..., key_generation: _Optional[int] = ..., event_digest: _Optional[bytes] = ..., content_digest: _Optional[bytes] = ..., kind: _Optional[str] = ..., received_ms: _Optional[int] = ..., nonce: _Optional[bytes] = ..., ciphertext: _Optional[bytes] = ..., num_redactions: _Optional[int] = ...) -> None: ...

class FeedbackConsent(_message.Message):
    __slots__ = ("tenant", "user_digest", "granted", "policy_version", "decided_ms", "received_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DECIDED_MS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user_digest: str
    granted: bool
    policy_version: str
    decided_ms: int
    received_ms: int
    def __init__(self, tenant: _Optional[str] = ..., user_digest: _Optional[str] = ..., granted: _Optional[bool] = ..., policy_version: _Optional[str] = ..., decided_ms: _Optional[int] = ..., received_ms: _Optional[int] = ...) -> None: ...

class FeedbackErasure(_message.Message):
    __slots__ = ("tenant", "user_digest", "key_generation", "received_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user_digest: str
    key_generation: int
    received_ms: int
    def __init__(self, tenant: _Optional[str] = ..., user_digest: _Optional[str] = ..., key_generation: _Optional[int] = ..., received_ms: _Optional[int] = ...) -> None: ...

class FeedbackRecord(_message.Message):
    __slots__ = ("open", "event", "consent", "erasure")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    ERASURE_FIELD_NUMBER: _ClassVar[int]
    open: FeedbackOpen
    event: FeedbackEventRecord
    consent: FeedbackConsent
    erasure: FeedbackErasure
    def __init__(self, open: _Optional[_Union[FeedbackOpen, _Mapping]] = ..., event: _Optional[_Union[FeedbackEventRecord, _Mapping]] = ..., consent: _Optional[_Union[FeedbackConsent, _Mapping]] = ..., erasure: _Optional[_Union[FeedbackErasure, _Mapping]] = ...) -> None: ...
