"""Feedback events: CloudEvents 1.0 of closed types, parsed from hostile bytes.

Source: https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md
"""

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import pydantic_core
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from etude.common.errors import InvalidFieldError
from etude.common.feedback import payloads
from etude.common.feedback.payloads import Identifier, OptionalIdentifier, WireModel

MAX_EVENT_BYTES = 256 << 10
MAX_BATCH_BYTES = 4 << 20
MAX_BATCH_EVENTS = 1_000

TYPE_PREFIX = "dev.etude.feedback."
TYPE_SUFFIX = ".v1"

TraceParent = Annotated[
    str, Field(pattern=r"^([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$")
]

P = TypeVar("P", bound=WireModel)


class Consent(WireModel):
    """Consent of the user, as the client knows it when the event happens."""

    granted: bool
    policy_version: Identifier
    """Version of the text that the user agreed to."""
    at: AwareDatetime
    """Time of the user's decision."""


class EventData(WireModel, Generic[P]):
    """Data of an event: who, about what, with whose consent."""

    tenant: Identifier
    user: Identifier
    """Pseudonym of the user within the tenant."""
    rollout: Identifier
    """Rollout id that the gateway gave to the conversation's branch."""
    policy_version: OptionalIdentifier = ""
    experiment: OptionalIdentifier = ""
    arm: OptionalIdentifier = ""
    consent: Consent
    payload: P


class FeedbackEvent(WireModel, Generic[P]):
    """One feedback event as a CloudEvent."""

    specversion: Literal["1.0"]
    id: Identifier
    """Idempotency key: unique for its source."""
    source: Identifier
    """Client and version."""
    type: str
    subject: Identifier
    """Conversation."""
    time: AwareDatetime
    datacontenttype: Literal["application/json"] = "application/json"
    dataschema: OptionalIdentifier = ""
    traceparent: TraceParent = ""
    data: EventData[P]

    @property
    def kind(self) -> str:
        """Type without prefix and version: "accepted"."""
        return kind_of(self.type)


AnyEvent = FeedbackEvent[Any]

EVENTS: Mapping[str, type[AnyEvent]] = {
    "shown": FeedbackEvent[payloads.ShownPayload],
    "accepted": FeedbackEvent[payloads.AcceptedPayload],
    "rejected": FeedbackEvent[payloads.RejectedPayload],
    "edit_applied": FeedbackEvent[payloads.EditAppliedPayload],
    "edit_observed": FeedbackEvent[payloads.EditObservedPayload],
    "followup": FeedbackEvent[payloads.FollowupPayload],
    "thumb": FeedbackEvent[payloads.ThumbPayload],
    "reason": FeedbackEvent[payloads.ReasonPayload],
    "test_result": FeedbackEvent[payloads.TestResultPayload],
    "turn_ended": FeedbackEvent[payloads.TurnEndedPayload],
    "task_closed": FeedbackEvent[payloads.TaskClosedPayload],
    "demonstration": FeedbackEvent[payloads.DemonstrationPayload],
    "annotated": FeedbackEvent[payloads.AnnotatedPayload],
    "dryrun": FeedbackEvent[payloads.DryRunPayload],
}
"""Model of each type."""


def event_type(kind: str) -> str:
    """Type attribute of a kind of event."""
    return f"{TYPE_PREFIX}{kind}{TYPE_SUFFIX}"


def kind_of(text: str) -> str:
    """Kind in a type attribute; empty for a type that is not ours."""
    if not text.startswith(TYPE_PREFIX) or not text.endswith(TYPE_SUFFIX):
        return ""
    kind = text[len(TYPE_PREFIX) : -len(TYPE_SUFFIX)]
    return kind if kind in EVENTS else ""


def json_schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a kind of event.

    Raises:
        InvalidFieldError: there is no such kind.
    """
    if kind not in EVENTS:
        raise InvalidFieldError("type", f"is not one of {', '.join(sorted(EVENTS))}")
    schema = EVENTS[kind].model_json_schema(by_alias=True)
    schema["properties"]["type"] = {"const": event_type(kind)}
    schema["$id"] = f"urn:etude:feedback:{kind}:v1"
    return schema


class _TypeAttribute(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: str


def parse_event(data: bytes) -> AnyEvent:
    """Parse one event in JSON.

    Raises:
        InvalidFieldError: naming the first field that is wrong.
    """
    # pydantic's JSON parser stops at 200 levels, refuses invalid UTF-8, and converts no types.
    try:
        type_ = _TypeAttribute.model_validate_json(data).type
    except ValidationError as error:
        problem: InvalidFieldError = first_problem(error)
        raise problem from None
    model = EVENTS.get(kind_of(type_))
    if model is None:
        raise InvalidFieldError("type", f"is not {event_type('KIND')} of a known kind")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        problem = first_problem(error)
        raise problem from None


def split_batch(data: bytes) -> list[bytes]:
    """Split a batch into the JSON of its events.

    Raises:
        InvalidFieldError: it is no list, or has too many events.
    """
    try:
        items = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError:
        raise InvalidFieldError("batch", "is no JSON") from None
    if not isinstance(items, list):
        raise InvalidFieldError("batch", "is not a list of events")
    if len(items) > MAX_BATCH_EVENTS:
        raise InvalidFieldError("batch", f"has more than {MAX_BATCH_EVENTS} events")
    return [pydantic_core.to_json(item) for item in items]


def first_problem(error: ValidationError) -> InvalidFieldError:
    """The first problem that a model found, without the input: that may hold a secret."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # The name of an unknown field is the client's, and may be of any length.
    place = ".".join(str(part)[:64] for part in problem["loc"][:8])
    return InvalidFieldError(place or "event", problem["msg"][:200])
