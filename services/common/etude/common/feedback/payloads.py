"""Payloads of feedback events: one model for each type.

Texts are bounded in characters; the size of a whole event is bounded where it is parsed.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_TEXT = 64 << 10
"""Characters of a user's words, and of the text that a user keeps."""
MAX_LINES = 4_096
"""Lines of one edit whose hashes are kept; the rest of a larger edit is not observed."""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}$")]
"""A name that a client chose: no spaces, and no @, so that an address is none."""
OptionalIdentifier = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/+-]{0,127})?$")]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
LineHash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""Start of the hash of a line without its indentation, keyed by the client's secret."""


class WireModel(BaseModel):
    """Base of what clients send: unknown fields and converted types are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )


class ReasonCategory(StrEnum):
    """Closed list of reasons for a user's verdict."""

    WRONG = "Wrong"
    INCOMPLETE = "Incomplete"
    UNWANTED_CHANGE = "UnwantedChange"
    STYLE = "Style"
    SLOW = "Slow"
    UNSAFE = "Unsafe"
    OTHER = "Other"


class TurnOutcome(StrEnum):
    """End of a turn, as the client saw it."""

    COMPLETED = "Completed"
    CANCELLED = "Cancelled"
    TIMED_OUT = "TimedOut"
    BROKEN_TOOL_CALL = "BrokenToolCall"


class TaskOutcome(StrEnum):
    """End of a task, as its user left it."""

    MERGED = "Merged"
    CLOSED = "Closed"
    ABANDONED = "Abandoned"
    REVERTED = "Reverted"


class TurnPayload(WireModel):
    """Base of payloads that concern one turn of the rollout."""

    turn: Count
    """Number of the turn in its rollout, from 0."""


class ShownPayload(TurnPayload):
    """Something of a turn was shown to the user."""

    num_lines: Count = 0
    """Lines of a suggestion or of a diff; 0 for text."""


class AcceptedPayload(TurnPayload):
    """The user accepted a suggestion or an edit."""


class RejectedPayload(TurnPayload):
    """The user rejected a suggestion or an edit."""


class EditAppliedPayload(TurnPayload):
    """An edit of the policy was written to the user's files."""

    edit: Identifier
    language: Annotated[str, Field(max_length=40)] = ""
    num_lines: Count
    """Lines that the policy wrote."""
    line_hashes: Annotated[list[LineHash], Field(max_length=MAX_LINES)]
    """Of these lines, sorted; a line that stands twice has its hash twice."""
    diff: Text = ""


class EditObservedPayload(WireModel):
    """The file of an earlier edit was looked at again, or could not be."""

    edit: Identifier
    age_s: Seconds
    """Seconds since the edit was applied, by a monotonic clock of the client."""
    is_file_seen: bool
    """False if the file was not found: the observation is censored."""
    num_alive_lines: Count = 0
    """Lines of the edit that are still in the file, by their hashes."""


class FollowupPayload(TurnPayload):
    """The user's next message after a turn."""

    text: Text
    after_s: Seconds
    """Seconds between the end of the turn and the message."""


class ThumbPayload(TurnPayload):
    """A thumb up or down."""

    is_positive: bool


class ReasonPayload(TurnPayload):
    """Reason for a verdict, which a client asks for with every negative thumb."""

    category: ReasonCategory
    text: Text = ""


class TestResultPayload(TurnPayload):
    """Tests ran in the user's folder after a turn."""

    num_passed: Count
    num_failed: Count
    num_errored: Count = 0


class TurnEndedPayload(TurnPayload):
    """A turn ended."""

    outcome: TurnOutcome
    wall_s: Seconds
    num_tool_calls: Count = 0
    num_broken_tool_calls: Count = 0


class TaskClosedPayload(WireModel):
    """The user's task ended, perhaps days later."""

    outcome: TaskOutcome


class DemonstrationPayload(TurnPayload):
    """The text that the user finally kept: trained as a supervised example."""

    text: Text


class AnnotatedPayload(WireModel):
    """A score from an annotation tool, such as Langfuse."""

    name: Identifier
    score: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
    comment: Text = ""


class DryRunPayload(WireModel):
    """A check of the whole way to the ledger, which stores nothing."""

    text: Text = ""
