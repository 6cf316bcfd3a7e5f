"""What a rollout has called so far, and what of it brings a fresh environment to that state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from etude.agent.tools.base import Access, ErrorKind, Tool, ToolOutcome
from etude.agent.turns import ToolCall
from etude.common.errors import EtudeError, ReusedIdError

MAX_LOG_BYTES = 32 << 20
"""Arguments and results of one rollout. Its transcript holds them too, which is far shorter."""

_ONLY_READS = frozenset({Access.READ, Access.TREE})


class DivergedError(EtudeError):
    """A call that was run again had another result: the state is not what it was."""

    code = grpc.StatusCode.ABORTED
    reason = "ReplayDiverged"


class Logged(NamedTuple):
    """One call with its result."""

    call: ToolCall
    outcome: ToolOutcome
    is_repeated: bool
    """Whether it may have changed something, so that a fresh environment needs it again."""


@dataclass(slots=True)
class CallLog:
    """The calls of one environment in the order of their turns, with their results."""

    tools: Mapping[str, type[Tool]]
    """What is called by which name."""
    _turns: list[Sequence[Logged]] = field(default_factory=list)
    _by_id: dict[str, Logged] = field(default_factory=dict)
    _num_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether an environment can be made again from it."""
        return self._num_bytes <= MAX_LOG_BYTES

    def answered(self, calls: Sequence[ToolCall]) -> dict[str, ToolOutcome]:
        """Results by id of those calls that have one.

        Raises:
            ReusedIdError: an id was another call before.
        """
        known = {call.call_id: self._by_id[call.call_id] for call in calls if self._has(call)}
        return {call_id: logged.outcome for call_id, logged in known.items()}

    def add(self, calls: Sequence[ToolCall], outcomes: Sequence[ToolOutcome]) -> None:
        """Note a turn that was answered."""
        turn = [
            Logged(call, outcome, self._is_repeated(call, outcome))
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        self._turns.append(turn)
        self._by_id |= {logged.call.call_id: logged for logged in turn}
        self._num_bytes += sum(map(_size, turn))

    def repeated(self) -> Sequence[Sequence[Logged]]:
        """What a fresh environment needs again, turn by turn; the rest is answered from here."""
        again = ([each for each in turn if each.is_repeated] for turn in self._turns)
        return [turn for turn in again if turn]

    def _has(self, call: ToolCall) -> bool:
        logged = self._by_id.get(call.call_id)
        if logged is not None and logged.call != call:
            raise ReusedIdError(f"call {call.call_id!r} was another call before")
        return logged is not None

    def _is_repeated(self, call: ToolCall, outcome: ToolOutcome) -> bool:
        """Whether a call may have changed something; one of a tool that nobody knows may have."""
        if outcome.kind is ErrorKind.INVALID:
            return False  # it was refused before it ran
        tool = self.tools.get(call.name)
        return tool is None or tool.access not in _ONLY_READS


def check(turn: Sequence[Logged], outcomes: Sequence[ToolOutcome]) -> None:
    """See that calls which were run again did what they did before.

    Raises:
        DivergedError: one did not.
    """
    for logged, outcome in zip(turn, outcomes, strict=True):
        before, call = logged.outcome, logged.call
        if (before.content, before.kind) != (outcome.content, outcome.kind):
            raise DivergedError(
                f"call {call.call_id} ({call.name}) was run again and had another result:"
                f" {_excerpt(before.content, outcome.content)}"
            )


def _excerpt(before: str, now: str) -> str:
    """Where two results begin to differ."""
    same = next(
        (place for place, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
        min(len(before), len(now)),
    )
    return f"from character {same} on {before[same : same + 40]!r} was {now[same : same + 40]!r}"


def _size(logged: Logged) -> int:
    return len(logged.call.arguments_json) + len(logged.outcome.content)
