from etude.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServedPolicyVersion(_message.Message):
    __slots__ = ("run_uid", "version", "checkpoint")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    version: _weights_pb2.PolicyVersion
    checkpoint: str
    def __init__(self, run_uid: _Optional[str] = ..., version: _Optional[_Union[_weights_pb2.PolicyVersion, _Mapping]] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class ReleaseCaller(_message.Message):
    __slots__ = ("request_id", "caller", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    caller: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., caller: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class TaskSamples(_message.Message):
    __slots__ = ("expected", "scored")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    expected: int
    scored: int
    def __init__(self, expected: _Optional[int] = ..., scored: _Optional[int] = ...) -> None: ...

class MetricComparison(_message.Message):
    __slots__ = ("metric", "num_tasks", "num_unpaired", "difference", "low", "high", "candidate_samples", "served_samples")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPAIRED_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SERVED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    metric: str
    num_tasks: int
    num_unpaired: int
    difference: float
    low: float
    high: float
    candidate_samples: TaskSamples
    served_samples: TaskSamples
    def __init__(self, metric: _Optional[str] = ..., num_tasks: _Optional[int] = ..., num_unpaired: _Optional[int] = ..., difference: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., candidate_samples: _Optional[_Union[TaskSamples, _Mapping]] = ..., served_samples: _Optional[_Union[TaskSamples, _Mapping]] = ...) -> None: ...

class ReleaseDecision(_message.Message):
    __slots__ = ("number", "action", "sentence", "evidence", "decided_unix_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    action: str
    sentence: str
    evidence: str
    decided_unix_ms: int
    def __init__(self, number: _Optional[int] = ..., action: _Optional[str] = ..., sentence: _Optional[str] = ..., evidence: _Optional[str] = ..., decided_unix_ms: _Optional[int] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("caller", "candidate", "compared_with", "comparisons", "findings")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    COMPARED_WITH_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    caller: ReleaseCaller
    candidate: ServedPolicyVersion
    compared_with: ServedPolicyVersion
    comparisons: _containers.RepeatedCompositeFieldContainer[MetricComparison]
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, caller: _Optional[_Union[ReleaseCaller, _Mapping]] = ..., candidate: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ..., compared_with: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ..., comparisons: _Optional[_Iterable[_Union[MetricComparison, _Mapping]]] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: ReleaseDecision
    def __init__(self, decision: _Optional[_Union[ReleaseDecision, _Mapping]] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("caller", "version", "without_gate")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GATE_FIELD_NUMBER: _ClassVar[int]
    caller: ReleaseCaller
    version: ServedPolicyVersion
    without_gate: bool
    def __init__(self, caller: _Optional[_Union[ReleaseCaller, _Mapping]] = ..., version: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ..., without_gate: _Optional[bool] = ...) -> None: ...

class PromoteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: ReleaseDecision
    def __init__(self, decision: _Optional[_Union[ReleaseDecision, _Mapping]] = ...) -> None: ...

class RollBackRequest(_message.Message):
    __slots__ = ("caller", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: ReleaseCaller
    version: ServedPolicyVersion
    def __init__(self, caller: _Optional[_Union[ReleaseCaller, _Mapping]] = ..., version: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ...) -> None: ...

class RollBackResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: ReleaseDecision
    def __init__(self, decision: _Optional[_Union[ReleaseDecision, _Mapping]] = ...) -> None: ...

class FreezeRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: ReleaseCaller
    def __init__(self, caller: _Optional[_Union[ReleaseCaller, _Mapping]] = ...) -> None: ...

class FreezeResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: ReleaseDecision
    def __init__(self, decision: _Optional[_Union[ReleaseDecision, _Mapping]] = ...) -> None: ...

class UnfreezeRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: ReleaseCaller
    def __init__(self, caller: _Optional[_Union[ReleaseCaller, _Mapping]] = ...) -> None: ...

class UnfreezeResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: ReleaseDecision
    def __init__(self, decision: _Optional[_Union[ReleaseDecision, _Mapping]] = ...) -> None: ...

class GetReleaseStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CanaryStatus(_message.Message):
    __slots__ = ("candidate", "experiment", "share", "started_unix_ms", "question")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    candidate: ServedPolicyVersion
    experiment: str
    share: int
    started_unix_ms: int
    question: str
    def __init__(self, candidate: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ..., experiment: _Optional[str] = ..., share: _Optional[int] = ..., started_unix_ms: _Optional[int] = ..., question: _Optional[str] = ...) -> None: ...

class GetReleaseStatusResponse(_message.Message):
    __slots__ = ("policy", "freeze", "stable", "previous", "canary", "decisions")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    freeze: str
    stable: ServedPolicyVersion
    previous: ServedPolicyVersion
    canary: CanaryStatus
    decisions: _containers.RepeatedCompositeFieldContainer[ReleaseDecision]
    def __init__(self, policy: _Optional[str] = ..., freeze: _Optional[str] = ..., stable: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ..., previous: _Optional[_Union[ServedPolicyVersion, _Mapping]] = ..., canary: _Optional[_Union[CanaryStatus, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[ReleaseDecision, _Mapping]]] = ...) -> None: ...
