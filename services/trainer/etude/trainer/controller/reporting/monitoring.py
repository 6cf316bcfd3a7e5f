"""Monitors of the batches of a phase: windows of their rollouts, and what is raised in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import TypeAdapter

from etude.common.api.meta import number
from etude.common.api.run.phase_goals import MonitorRule
from etude.common.api.run.roles import RewardsRole
from etude.common.monitors.registry import MONITORS, evaluate_window
from etude.common.monitors.window import Finding, RolloutFacts, Window
from etude.trainer import metrics
from etude.trainer.contents.call_figures import call_figures
from etude.trainer.contents.measures import num_tokens
from etude.trainer.controller.checkpoints.state import MonitorHistory
from etude.trainer.controller.reporting.rows import Row
from etude.v1 import journal_pb2, rollout_pb2

WINDOW_ROLLOUTS = 128
"""Batches are put together until they have as many rollouts."""
REFERENCE_WINDOWS = 7
PREVIOUS_WINDOWS = 64
"""Windows after the reference over which slow growth adds up."""


class BatchFindings(NamedTuple):
    """Findings of the window that a batch completed, if it did."""

    row: Row
    """Figures, for the row of its step."""
    freezes: list[Finding]
    """Those that stop the phase."""


_FACTS = TypeAdapter(tuple[RolloutFacts, ...])


@dataclass(slots=True, kw_only=True)
class BatchMonitors:
    """Evaluates windows of batches against the first ones of the phase that raised nothing."""

    report: Callable[[str], None]
    """Gets a sentence when a monitor begins to raise windows."""
    judges: frozenset[str]
    """Names of the reward functions that are judges."""
    history: MonitorHistory
    """Earlier windows of the phase; part of each checkpoint."""
    rules: Sequence[MonitorRule] = ()

    def find_penalties(
        self, groups: Sequence[Sequence[journal_pb2.JournalRollout]], *, step: int
    ) -> list[journal_pb2.JournalPenalty]:
        """Find the penalties of a batch, before it is trained and added.

        Args:
            groups: finished rollouts, by group.
            step: of the phase that trains them.
        """
        rules = [each for each in self._rules_at(step) if each.action == "Penalise"]
        amounts: dict[str, float] = {each.name: number(each.penalty) for each in rules}
        if not amounts:
            return []
        records = [record for group in groups for record in group]
        facts = [each for group in groups for each in group_facts(group, self.judges, entropy=0.0)]
        reference = [_load(text) for text in self.history.reference]
        raised = set(self.history.raised)
        pending = (*_FACTS.validate_json(self.history.pending), *facts)
        if len(pending) >= WINDOW_ROLLOUTS:
            raised = {each.monitor for each in self._evaluate(pending) if each.is_raised}
        return [
            journal_pb2.JournalPenalty(
                rollout_id=record.rollout.rollout_id,
                amount=amounts[monitor.name],
                monitor=monitor.name,
            )
            for monitor in MONITORS
            if monitor.name in amounts and monitor.name in raised and monitor.is_offence is not None
            for record, each in zip(records, facts, strict=True)
            if not each.is_masked and monitor.is_offence(each, reference)
        ]

    def add_batch(
        self,
        groups: Sequence[Sequence[journal_pb2.JournalRollout]],
        *,
        step: int,
        entropy: float,
    ) -> BatchFindings:
        """Add a trained batch; a full window is evaluated.

        Args:
            groups: finished rollouts, by group.
            step: of the phase that trained them.
            entropy: of that step, in nats per trained token; 0 or NaN if it is not known.
        """
        history = self.history
        pending = _FACTS.validate_json(history.pending)
        for group in groups:
            pending += tuple(group_facts(group, self.judges, entropy=entropy))
        history.pending = _FACTS.dump_json(pending).decode()
        if len(pending) < WINDOW_ROLLOUTS:
            return BatchFindings({}, [])
        findings = self._evaluate(pending)
        raised = [each for each in findings if each.is_raised]
        self._report(raised)
        is_usual = not raised and len(history.reference) < REFERENCE_WINDOWS
        (history.reference if is_usual else history.previous).append(history.pending)
        history.pending = "[]"
        del history.previous[:-PREVIOUS_WINDOWS]
        for each in findings:
            metrics.MONITOR_FIGURE.labels(monitor=each.monitor).set(each.figure)
            metrics.MONITOR_LIMIT.labels(monitor=each.monitor).set(each.limit)
        row: Row = {"monitors": {each.monitor: round(each.figure, 6) for each in findings}}
        frozen_by = {each.name for each in self._rules_at(step) if each.action == "Freeze"}
        return BatchFindings(row, [each for each in raised if each.monitor in frozen_by])

    def _rules_at(self, step: int) -> list[MonitorRule]:
        return [each for each in self.rules if step > each.after_step]

    def _evaluate(self, rollouts: Sequence[RolloutFacts]) -> list[Finding]:
        previous = tuple(map(_load, self.history.previous))
        reference = [_load(text) for text in self.history.reference]
        return evaluate_window(Window(rollouts=rollouts, previous=previous), reference)

    def _report(self, raised: Sequence[Finding]) -> None:
        for each in raised:
            if each.monitor not in self.history.raised:
                metrics.MONITOR_RAISED.labels(monitor=each.monitor, action=each.action).inc()
                self.report(f"{each.monitor} ({each.action}): {each.sentence}")
        self.history.raised = [each.monitor for each in raised]


def _load(text: str) -> Window:
    return Window(rollouts=_FACTS.validate_json(text))


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
    found = call_figures(record)
    judged = [1 + part.value for part in record.reward.parts if part.name in judges]
    is_finished = rollout.ending == rollout_pb2.ENDING_STOPPED
    return RolloutFacts(
        group=rollout.group_id,
        calls=rollout.costs.tool_calls,
        broken_calls=rollout.costs.malformed_calls,
        edits=found.changes,
        is_question=is_finished and found.asks_question and not found.changes,
        is_masked=_success(record) is None,
        tokens=num_tokens(record) or None,
        hidden_passed=_success(record),
        judge_reward=sum(judged) / len(judged) if judged else None,
        has_injection=bool(judges) and found.addresses_judge,
    )


def _success(record: journal_pb2.JournalRollout) -> float | None:
    """Success of a rollout; None if it is masked."""
    reward = record.reward
    return reward.success if reward.WhichOneof("result") == "reward" else None


def _difficulty(successes: Sequence[float | None], place: int) -> float | None:
    others = [s for i, s in enumerate(successes) if i != place and s is not None]
    return 1 - sum(others) / len(others) if others else None
