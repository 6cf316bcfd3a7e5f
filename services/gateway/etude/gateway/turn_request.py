"""Request for one turn of the policy, in no protocol's own form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool"]
ToolFormatName = Literal["", "Xml", "Native"]
"""As `rollout.toolFormat` of a run."""
Schema = Mapping[str, object]
"""JSON schema of one tool's function, as chat templates read it."""


class WireCall(NamedTuple):
    """One tool call of an assistant's message."""

    call_id: str
    name: str
    """Empty for a call that does not parse, of which only a harness is told."""
    arguments: Mapping[str, object]


class WireMessage(NamedTuple):
    """One message of a conversation."""

    role: Role
    content: str
    calls: tuple[WireCall, ...] = ()
    """Of an assistant."""
    call_id: str = ""
    """Of a tool: the call whose result it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters of a turn."""

    max_tokens: int | None = None
    """None: as many as the model's context has room for."""
    temperature: float = 1.0
    """0 is greedy."""
    seed: int | None = None
    """None: not reproducible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """Conversation that the policy continues by one turn."""

    messages: tuple[WireMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or tokens to continue as they are, instead of messages."""
    tools: tuple[Schema, ...] = ()
    may_call: bool = True
    """False: tools are shown, and a call in the turn is text."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stream: bool = False
    reports_usage: bool = True
    """False: a stream ends without token counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMarks:
    """A client's marks of a request: the rollout that it belongs to, and its place there."""

    rollout: str = ""
    """Logical rollout; empty: the one whose turns the conversation repeats, or a new one."""
    compaction_of: str = ""
    """Branch that this conversation summarises and replaces."""
    tool_format: ToolFormatName = ""
    """Form of tools that the harness trained the policy with; empty: the gateway chooses one."""
    is_side: bool = False
    """A title or a summary for the product's own use: no part of what the policy is judged by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurn:
    """One turn of the policy."""

    turn_id: str
    """Unique; 32 hexadecimal digits."""
    rollout: str
    branch: str
    created_s: int
    """Seconds since the epoch."""
    version: str
    """Policy version that sampled the last token."""
    content: str
    thinking: str
    calls: tuple[WireCall, ...]
    is_cut: bool
    """The limit of tokens was reached."""
    prompt_tokens: int
    completion_tokens: int
    thinking_tokens: int


class TextPiece(NamedTuple):
    """Text of a turn that is not finished; pieces add up to its thinking and its content."""

    text: str
    is_thinking: bool


class TurnStart(NamedTuple):
    """Beginning of a turn: its engine has been asked."""

    turn_id: str
    rollout: str
    branch: str
    created_s: int
    prompt_tokens: int


TurnEvent = TurnStart | TextPiece | FinishedTurn
"""One event of a turn: its start, then pieces if the client streams, then the whole."""
