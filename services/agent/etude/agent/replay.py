"""Call log of a rollout, and the calls to replay in a fresh environment after a failover."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import Access, ErrorKind, Tool, ToolOutcome
from etude.common.errors import EtudeError, ReusedIdError

MAX_LOG_BYTES = 32 << 20
"""Arguments and results of one rollout. Its transcript holds them too, which is far shorter."""

_ONLY_READS = frozenset({Access.READ, Access.TREE})


class DivergedError(EtudeError):
    """A replayed call had another result: the environment's state differs."""

    code = grpc.StatusCode.ABORTED
    reason = "ReplayDiverged"


class LoggedCall(NamedTuple):
    """One call with its result."""

    call: ToolCall
    outcome: ToolOutcome
    is_repeated: bool
    """True if it may have changed something, so that a fresh environment needs it again."""


@dataclass(slots=True)
class CallLog:
    """Calls of one environment in the order of their turns, with their results."""

    tools: Mapping[str, type[Tool]]
    """Tools by name."""
    _turns: list[Sequence[LoggedCall]] = field(default_factory=list)
    _by_id: dict[str, LoggedCall] = field(default_factory=dict)
    _num_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        """True while the log is complete, so that an environment can be rebuilt from it."""
        return self._num_bytes <= MAX_LOG_BYTES

    def known_outcomes(self, calls: Sequence[ToolCall]) -> dict[str, ToolOutcome]:
        """Stored results of those calls that have one, by id.

        Raises:
            ReusedIdError: an id was another call before.
        """
        known = {call.call_id: self._by_id[call.call_id] for call in calls if self._has(call)}
        return {call_id: logged.outcome for call_id, logged in known.items()}

    def add(self, calls: Sequence[ToolCall], outcomes: Sequence[ToolOutcome]) -> None:
        """Record an answered turn."""
        turn = [
            LoggedCall(call, outcome, self._is_repeated(call, outcome))
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        self._turns.append(turn)
        self._by_id |= {logged.call.call_id: logged for logged in turn}
        self._num_bytes += sum(map(_size, turn))

    def calls_to_replay(self) -> Sequence[Sequence[LoggedCall]]:
        """Calls to replay in a fresh environment, turn by turn; other results come from the log."""
        again = ([each for each in turn if each.is_repeated] for turn in self._turns)
        return [turn for turn in again if turn]

    def _has(self, call: ToolCall) -> bool:
        logged = self._by_id.get(call.call_id)
        if logged is not None and logged.call != call:
            raise ReusedIdError(f"call {call.call_id!r} was another call before")
        return logged is not None

    def _is_repeated(self, call: ToolCall, outcome: ToolOutcome) -> bool:
        """True if a call may have changed something, as a call of an unknown tool may."""
        if outcome.kind is ErrorKind.INVALID:
            return False  # it was refused before it ran
        tool = self.tools.get(call.name)
        return tool is None or tool.access not in _ONLY_READS


def check_replay(turn: Sequence[LoggedCall], outcomes: Sequence[ToolOutcome]) -> None:
    """Check that replayed calls had their earlier results.

    Raises:
        DivergedError: one had another result.
    """
    for logged, outcome in zip(turn, outcomes, strict=True):
        before, call = logged.outcome, logged.call
        if (before.content, before.kind) != (outcome.content, outcome.kind):
            raise DivergedError(
                f"replayed call {call.call_id} ({call.name}) had another result:"
                f" {_excerpt(before.content, outcome.content)}"
            )


def _excerpt(before: str, now: str) -> str:
    """Excerpts of two results from their first difference."""
    same = next(
        (place for place, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
        min(len(before), len(now)),
    )
    return f"from character {same} on {before[same : same + 40]!r} was {now[same : same + 40]!r}"


def _size(logged: LoggedCall) -> int:
    return len(logged.call.arguments_json) + len(logged.outcome.content)
