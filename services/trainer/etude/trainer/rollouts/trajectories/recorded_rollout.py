"""Recorded rollout: the turns and calls of a rollout under way, as its records hold them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

from etude.agent import messages
from etude.agent.completions import Completion, FinishReason
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.trajectory import PolicySpan
from etude.common.routed_experts import RouteRows
from etude.common.weights import VersionId
from etude.trainer.rollouts.trajectories.rollback import Rollback
from etude.v1 import environments_pb2, trajectory_log_pb2

_DIGEST_BYTES = 16


class Place(NamedTuple):
    """Place of a beginning among all of one rollout; the highest replaces the others."""

    epoch: int
    dispatch: int
    attempt: int

    @classmethod
    def read(cls, message: trajectory_log_pb2.TrajectoryPlace) -> Self:
        """The place in a message."""
        return cls(message.epoch, message.dispatch, message.attempt)

    def message(self) -> trajectory_log_pb2.TrajectoryPlace:
        """The place as a message."""
        return trajectory_log_pb2.TrajectoryPlace(
            epoch=self.epoch, dispatch=self.dispatch, attempt=self.attempt
        )


@dataclass(slots=True)
class RecordedRollout:
    """Turns and calls of a rollout so far, and the environment that they ran in."""

    records: list[trajectory_log_pb2.TrajectoryRecord] = field(default_factory=list)
    """Turns, results and changes in order, without places and leases."""
    turns: list[trajectory_log_pb2.TrajectoryTurn] = field(default_factory=list)
    results: list[trajectory_log_pb2.TrajectoryResults] = field(default_factory=list)
    changes: list[bytes] = field(default_factory=list)
    """Diffs of the workspace at the ends of the task's steps so far."""
    lease: environments_pb2.Lease | None = None
    """The last environment; unset once it is known to be gone."""
    active_s: float = 0.0
    """Time that counts toward the rollout's limit."""

    @classmethod
    def fold(cls, records: Iterable[trajectory_log_pb2.TrajectoryRecord]) -> Self:
        """Fold the records of one beginning, in order."""
        rollout = cls()
        for record in records:
            rollout.add(record)
        return rollout

    def cut_abandoned(self, rollbacks: Sequence[Rollback]) -> "RecordedRollout":
        """The rollout up to its first turn of a version that was rolled back.

        Its environment has run what came later, so that another takes its place.
        """
        for place, record in enumerate(self.records):
            versions = [
                VersionId.from_proto(version)
                for span in record.turn.spans
                for version in (span.sampled, span.context)
            ]
            if any(each.abandons(version) for each in rollbacks for version in versions):
                return RecordedRollout.fold(self.records[:place])
        return self

    def add(self, record: trajectory_log_pb2.TrajectoryRecord) -> None:
        """Add the next record."""
        self.active_s = record.active_seconds
        match record.WhichOneof("body"):
            case "start":
                self.lease = record.start.lease
            case "lease":
                self.lease = record.lease
            case "turn":
                self.turns.append(record.turn)
                self.records.append(record)
            case "results":
                self.results.append(record.results)
                self.records.append(record)
            case "change":
                self.changes.append(record.change.diff)
                self.records.append(record)
            case _:
                pass

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def token_seconds(self) -> float:
        """Time that sampling took."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def tool_seconds(self) -> float:
        """Time that calls took."""
        return sum(each.seconds for each in self.results)

    def answered_turns(self) -> list[tuple[Sequence[ToolCall], Sequence[ToolOutcome]]]:
        """Calls with their results, in the order in which they were answered."""
        return [(read_calls(each), read_outcomes(each)) for each in self.results]


def read_calls(results: trajectory_log_pb2.TrajectoryResults) -> Sequence[ToolCall]:
    """The calls of a record."""
    return [ToolCall(call.call_id, call.name, call.arguments_json) for call in results.calls]


def read_outcomes(results: trajectory_log_pb2.TrajectoryResults) -> Sequence[ToolOutcome]:
    """The outcomes of a record's calls."""
    return [messages.from_result_message(result) for result in results.results]


def read_completion(turn: trajectory_log_pb2.TrajectoryTurn) -> Completion:
    """The completion of a record."""
    spans = [
        PolicySpan(
            span.start,
            span.end,
            VersionId.from_proto(span.sampled),
            VersionId.from_proto(span.context),
            span.replica,
        )
        for span in turn.spans
    ]
    finish = FinishReason.LENGTH if turn.is_cut else FinishReason.STOP
    routes = RouteRows.read(turn.routes) if turn.HasField("routes") else None
    return Completion(list(turn.token_ids), list(turn.logprobs), spans, finish, routes)


def digest_prompt(prompt_ids: Sequence[int]) -> bytes:
    """Digest of a prompt."""
    ids = np.asarray(prompt_ids, dtype="<i4")
    return blake2b(ids.tobytes(), digest_size=_DIGEST_BYTES).digest()
