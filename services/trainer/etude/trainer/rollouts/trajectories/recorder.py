"""Recorder of one attempt at a rollout: sends each turn and each result to the trajectory log."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from etude.agent import messages
from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason, find_inconsistency
from etude.agent.replay import DivergedError
from etude.agent.token_policy import Sampler
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.trajectory import RolloutCosts
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.trajectories.log import TrajectoryLog
from etude.trainer.rollouts.trajectories.recorded_rollout import (
    Place,
    RecordedRollout,
    digest_prompt,
    read_completion,
)
from etude.v1 import environments_pb2, trajectory_log_pb2, weights_pb2

MAX_ROUTES_BYTES = 4 << 20
"""Recorded experts of one turn that the log keeps. Of a larger turn they are asked for again where
the rollout goes on."""

MAX_CHANGE_BYTES = 4 << 20
"""Largest change of a whole rollout that the log keeps."""


class EarlierSeconds(NamedTuple):
    """Time of turns of earlier attempts."""

    token_s: float
    tool_s: float


@dataclass(slots=True, kw_only=True)
class RolloutRecorder:
    """Records of one attempt at a rollout, which goes on from what was recorded before."""

    log: TrajectoryLog
    rollout_id: str
    group_id: str
    index: int
    place: Place
    rollout: RecordedRollout
    """The rollout so far, of which this recorder is the only owner."""
    lost_s: Callable[[], float]
    """Seconds that this attempt lost to services that were away."""
    is_continued: bool
    """True if an earlier attempt may have called engines."""
    num_carried: int = field(init=False)
    """Turns that an earlier attempt sampled."""
    _started_s: float = field(default_factory=time.monotonic)
    _active_s: float = field(init=False)
    """Of earlier attempts."""
    _lost_before_s: float = 0.0
    """Lost before the start, which the time since does not have."""
    _earlier: EarlierSeconds = field(init=False)
    _number: int = 0

    def __post_init__(self) -> None:
        self._active_s = self.rollout.active_s
        self._earlier = EarlierSeconds(self.rollout.token_seconds, self.rollout.tool_seconds)
        self.num_carried = len(self.rollout.turns)

    @property
    def call_prefix(self) -> str:
        """Part of the ids of engine calls: an engine may still run those of a lost attempt."""
        return "" if not self.is_continued else "{}.{}.{}/".format(*self.place)

    @property
    def active_s(self) -> float:
        """Time so far that counts toward the limit of the rollout."""
        lost_s = self.lost_s() - self._lost_before_s
        return self._active_s + time.monotonic() - self._started_s - lost_s

    def add_earlier_costs(self, costs: RolloutCosts) -> None:
        """Add the time of turns that were repeated, which took none."""
        costs.token_seconds += self._earlier.token_s
        costs.tool_seconds += self._earlier.tool_s

    def start(self, lease: environments_pb2.Lease) -> None:
        """Record the beginning in an environment, and all that was recorded before."""
        carried = self.rollout.records
        begin = trajectory_log_pb2.TrajectoryStart(lease=lease, carried=len(carried))
        self._write(trajectory_log_pb2.TrajectoryRecord(start=begin), self._active_s)
        self.rollout.lease = lease
        for record in carried:
            self._write(record, record.active_seconds)
        self._started_s, self._lost_before_s = time.monotonic(), self.lost_s()

    def add_turn(self, prompt_ids: Sequence[int], completion: Completion, seconds: float) -> None:
        """Record a completion."""
        turn = trajectory_log_pb2.TrajectoryTurn(
            prompt_tokens=len(prompt_ids),
            prompt_digest=digest_prompt(prompt_ids),
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            spans=[
                weights_pb2.PolicySpan(
                    sampled=span.sampled.to_proto(),
                    context=span.context.to_proto(),
                    start=span.start,
                    end=span.end,
                    replica=span.replica,
                )
                for span in completion.spans
            ],
            is_cut=completion.finish is FinishReason.LENGTH,
            seconds=seconds,
        )
        if completion.routes is not None and completion.routes.ids.nbytes <= MAX_ROUTES_BYTES:
            turn.routes.CopyFrom(completion.routes.message())
        self._add(trajectory_log_pb2.TrajectoryRecord(turn=turn))

    def add_results(
        self, calls: Sequence[ToolCall], outcomes: Sequence[ToolOutcome], seconds: float
    ) -> None:
        """Record answered calls."""
        results = trajectory_log_pb2.TrajectoryResults(
            calls=[messages.to_call_message(call) for call in calls],
            results=[
                messages.to_result_message(call.call_id, outcome)
                for call, outcome in zip(calls, outcomes, strict=True)
            ],
            seconds=seconds,
        )
        self._add(trajectory_log_pb2.TrajectoryRecord(results=results))

    def add_change(self, diff: bytes) -> None:
        """Record the change up to the end of a step of the task."""
        change = trajectory_log_pb2.TrajectoryChange(diff=diff)
        self._add(trajectory_log_pb2.TrajectoryRecord(change=change))

    def add_last_change(self, diff: bytes) -> None:
        """Record the change of a whole rollout, which has ended: it needs no environment any more.

        One that is too large is not recorded, and is made again where the rollout is repeated.
        """
        if len(diff) > MAX_CHANGE_BYTES:
            return
        change = trajectory_log_pb2.TrajectoryChange(diff=diff)
        record = trajectory_log_pb2.TrajectoryRecord(change=change)
        # Taking the diff is no time of the rollout's own: repeated turns must not exceed its limit.
        self._write(record, self.rollout.active_s)
        self.rollout.add(record)

    def move(self, lease: environments_pb2.Lease) -> None:
        """Record that the rollout goes on in another environment, once it has started."""
        if self._number:
            self._add(trajectory_log_pb2.TrajectoryRecord(lease=lease))

    def _add(self, record: trajectory_log_pb2.TrajectoryRecord) -> None:
        self._write(record, self.active_s)
        self.rollout.add(record)

    def _write(self, record: trajectory_log_pb2.TrajectoryRecord, active_s: float) -> None:
        record.rollout_id, record.group_id = self.rollout_id, self.group_id
        record.index, record.number = self.index, self._number
        record.place.CopyFrom(self.place.message())
        record.active_seconds = active_s
        self._number += 1
        self.log.append(record)


@dataclass(slots=True)
class RecordedSampler(Sampler):
    """Repeats the recorded turns of a rollout, then samples and records the next ones."""

    inner: Sampler
    recorder: RolloutRecorder
    chat: ChatFormat
    outage: OutageBudget
    _turn: int = 0

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        turn, self._turn = self._turn, self._turn + 1
        if turn < self.recorder.num_carried:
            return self._repeat(turn, prompt_ids)
        started_s = time.monotonic()
        completion = await self.inner.generate(
            prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        seconds = time.monotonic() - started_s
        vocab_size, end_ids = self.chat.vocab_size, self.chat.end_ids
        # One that the turn loop refuses would be repeated by every retry.
        if not find_inconsistency(
            completion, max_tokens=max_tokens, vocab_size=vocab_size, end_ids=end_ids
        ):
            self.recorder.add_turn(prompt_ids, completion, seconds)
            await self.outage.count_wait(self.recorder.log.wait_for_room())
        return completion

    def _repeat(self, turn: int, prompt_ids: Sequence[int]) -> Completion:
        """The recorded completion of a turn.

        Raises:
            DivergedError: it was sampled after another prompt.
        """
        recorded = self.recorder.rollout.turns[turn]
        if recorded.prompt_digest != digest_prompt(prompt_ids):
            raise DivergedError(
                f"turn {turn} was sampled after another prompt, of {recorded.prompt_tokens}"
                f" tokens; now it has {len(prompt_ids)}"
            )
        return read_completion(recorded)
