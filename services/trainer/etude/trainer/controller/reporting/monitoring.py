"""Monitors of the batches of a phase: windows of their rollouts, and what is raised in them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from etude.agent import transcript
from etude.common.api.run.roles import RewardsRole
from etude.common.monitors.judge_gap import addresses_judge
from etude.common.monitors.registry import evaluate_window
from etude.common.monitors.window import Finding, RolloutFacts, Window
from etude.trainer import metrics
from etude.trainer.controller.reporting.rows import Row, length
from etude.v1 import journal_pb2, rollout_pb2

WINDOW_ROLLOUTS = 128
"""Batches are put together until they have as many rollouts."""
REFERENCE_WINDOWS = 7
PREVIOUS_WINDOWS = 64
"""Windows after the reference over which slow growth adds up."""


@dataclass(slots=True)
class BatchMonitors:
    """Evaluates windows of batches against the first ones of the phase that raised nothing."""

    report: Callable[[str], None]
    """Gets a sentence when a monitor begins to raise windows."""
    judges: frozenset[str]
    """Names of the reward functions that are judges."""
    _facts: list[RolloutFacts] = field(default_factory=list)
    _reference: list[Window] = field(default_factory=list)
    _previous: deque[Window] = field(default_factory=lambda: deque(maxlen=PREVIOUS_WINDOWS))
    """Newest windows that are not in the reference."""
    _raised: frozenset[str] = frozenset()
    """Monitors that the last window raised: each is reported when it begins."""

    def add_batch(
        self, groups: Sequence[Sequence[journal_pb2.JournalRollout]], *, entropy: float
    ) -> Row:
        """Add a batch; returns the figures of a full window, else nothing.

        Args:
            groups: finished rollouts, by group.
            entropy: of the batch's step, in nats per trained token; 0 or NaN if it is not known.
        """
        for group in groups:
            self._facts += group_facts(group, self.judges, entropy=entropy)
        if len(self._facts) < WINDOW_ROLLOUTS:
            return {}
        window = Window(rollouts=tuple(self._facts))
        self._facts = []
        since = replace(window, previous=tuple(self._previous))
        findings = evaluate_window(since, self._reference)
        self._report([each for each in findings if each.is_raised])
        if not self._raised and len(self._reference) < REFERENCE_WINDOWS:
            self._reference.append(window)
        else:
            self._previous.append(window)
        for each in findings:
            metrics.MONITOR_FIGURE.labels(monitor=each.monitor).set(each.figure)
            metrics.MONITOR_LIMIT.labels(monitor=each.monitor).set(each.limit)
        return {"monitors": {each.monitor: round(each.figure, 6) for each in findings}}

    def _report(self, raised: Sequence[Finding]) -> None:
        for each in raised:
            if each.monitor not in self._raised:
                metrics.MONITOR_RAISED.labels(monitor=each.monitor, action=each.action).inc()
                self.report(f"{each.monitor} ({each.action}): {each.sentence}")
        self._raised = frozenset(each.monitor for each in raised)


def judge_names(rewards: RewardsRole | None) -> frozenset[str]:
    """Names of the functions of a rubric that are judges."""
    functions = rewards.functions if rewards is not None else ()
    return frozenset(each.name for each in functions if each.function == "Judge")


def group_facts(
    group: Sequence[journal_pb2.JournalRollout], judges: frozenset[str], *, entropy: float
) -> list[RolloutFacts]:
    """Facts of sibling rollouts; the difficulty of each is what its siblings made of the task."""
    successes = [_success(record) for record in group]
    return [
        replace(
            _facts(record, judges),
            difficulty=_difficulty(successes, place),
            entropy=entropy if entropy > 0 else None,
        )
        for place, record in enumerate(group)
    ]


def _facts(record: journal_pb2.JournalRollout, judges: frozenset[str]) -> RolloutFacts:
    rollout = record.rollout
    edits = sum(bool(transcript.edits(call)) for call in rollout.calls)
    judged = [1 + part.value for part in record.reward.parts if part.name in judges]
    is_finished = rollout.ending == rollout_pb2.ENDING_STOPPED
    asks = is_finished and transcript.asks_question(rollout.final_message)
    return RolloutFacts(
        group=rollout.group_id,
        calls=rollout.costs.tool_calls,
        broken_calls=rollout.costs.malformed_calls,
        edits=edits,
        is_question=asks and not edits,
        is_masked=_success(record) is None,
        tokens=length(rollout) or None,
        hidden_passed=_success(record),
        judge_reward=sum(judged) / len(judged) if judged else None,
        has_injection=bool(judges) and addresses_judge(rollout.final_message),
    )


def _success(record: journal_pb2.JournalRollout) -> float | None:
    """Success of a rollout; None if it is masked."""
    reward = record.reward
    return reward.success if reward.WhichOneof("result") == "reward" else None


def _difficulty(successes: Sequence[float | None], place: int) -> float | None:
    others = [s for i, s in enumerate(successes) if i != place and s is not None]
    return 1 - sum(others) / len(others) if others else None
