"""Accounting of a trained step: ledger, status, metrics, and its row of the record."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.common.weights import VersionId
from etude.trainer import metrics
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.staleness import StalenessBound
from etude.trainer.controller.journal.ledger import StepId
from etude.trainer.controller.phases.targets import record_measurement
from etude.trainer.controller.progress import RunFailedError
from etude.trainer.controller.reporting.monitoring import BatchMonitors, judge_names
from etude.trainer.controller.reporting.policy_metrics import (
    set_behaviour_metrics,
    set_policy_metrics,
)
from etude.trainer.controller.reporting.rows import (
    Row,
    StepFaults,
    mean,
    policy_fields,
    step_figures,
    step_row,
)
from etude.trainer.controller.run import Run
from etude.trainer.learner.batches import StepResult
from etude.v1 import journal_pb2

MONITOR_FROZE = "MonitorFroze"

REWARD_EWMA = 0.1
"""Weight of the newest batch in the smoothed reward."""


def refuse_left_batches(run: Run, phase: str) -> None:
    """Refuse batches of the journal that no step of the phase led to.

    Raises:
        RunFailedError: there are some.
    """
    # Batches of a later phase stay: they exist if an older checkpoint was restored.
    over = {phase, *run.progress.cursor.finished}
    for left in run.book.ledger.batches:
        if left.phase in over:
            raise RunFailedError(f"the journal holds batch {left}, which no step leads to")


@dataclass(slots=True)
class StepAccounting:
    """Accounts for the steps of one reinforcement-learning phase."""

    run: Run
    phase: str
    """Name of the phase."""
    bound: StalenessBound
    _monitors: BatchMonitors = field(init=False)
    _retried: int = field(init=False)
    """Rollouts retried up to the last step."""
    _dropped: int = field(init=False)
    """Rollouts dropped up to the last step."""

    def __post_init__(self) -> None:
        judges = judge_names(self.run.progress.resolved.spec.roles.rewards)
        progress = self.run.progress
        self._monitors = BatchMonitors(
            report=self._report_finding,
            judges=judges,
            history=progress.figures.monitors,
            rules=progress.phase.monitors or (),
        )
        self._count_faults()

    def _report_finding(self, message: str) -> None:
        self.run.reporter.record_event("MonitorRaised", message, warning=True)

    def find_penalties(self, groups: Sequence[RolloutGroup]) -> list[journal_pb2.JournalPenalty]:
        """Find what monitors subtract from the rewards of the next batch."""
        step = self.run.progress.cursor.step + 1
        penalties = self._monitors.find_penalties(_sibling_records(groups), step=step)
        for each in penalties:
            metrics.MONITOR_PENALISED.labels(monitor=each.monitor).inc()
        return penalties

    def _add_to_monitors(self, groups: Sequence[RolloutGroup], *, entropy: float) -> Row:
        """Add a batch; what freezes the phase is journaled, once."""
        step, book = self.run.progress.cursor.step, self.run.book
        findings = self._monitors.add_batch(_sibling_records(groups), step=step, entropy=entropy)
        for each in findings.freezes:
            known = book.ledger.frozen.get((self.phase, each.monitor))
            if known is None or known.number < step:
                body = journal_pb2.JournalFreeze(
                    phase=self.phase, step=step, monitor=each.monitor, sentence=each.sentence
                )
                book.write(journal_pb2.JournalRecord(freeze=body))
                metrics.MONITOR_FROZEN.labels(monitor=each.monitor).inc()
        return findings.row

    async def stop_if_frozen(self) -> bool:
        """Ask the controller to stop after a step that a monitor froze; true if one did.

        The decision is durable before it is carried out. It holds for every later controller, until
        the rule of the monitor lets its step pass.
        """
        rules = self.run.progress.phase.monitors or ()
        last: dict[str, int] = {
            each.name: each.after_step for each in rules if each.action == "Freeze"
        }
        stops = [
            each
            for each in self.run.book.ledger.frozen.values()
            if each.phase == self.phase and each.number > last.get(each.monitor, each.number)
        ]
        if not stops:
            return False
        await self.run.book.journal.wait_durable()
        text = "; ".join(
            f"{each.monitor} after step {each.number}: {each.sentence}" for each in stops
        )
        status, newest = self.run.reporter.status, max(each.number for each in stops)
        status.reason = MONITOR_FROZE
        status.message = (
            f"phases[].monitors of {self.phase}: {text};"
            f" set afterStep: {newest} or another action to let it go on"
        )
        self.run.reporter.record_event(MONITOR_FROZE, status.message, warning=True)
        self.run.commands.request_stop()
        return True

    def _count_faults(self) -> None:
        self._retried = self.run.progress.figures.retried
        self._dropped = self.run.book.ledger.discarded

    def position(self, version: VersionId) -> int | None:
        """Steps of the phase in a version; None if it was never published."""
        step = self.run.book.ledger.versions.get(version)
        start = self.run.progress.cursor.starts[self.phase]
        return None if step is None else max(0, step - start)

    def account_step(
        self, result: StepResult, groups: Sequence[RolloutGroup], *, waited_s: float
    ) -> Row:
        """Account for a trained batch, and build its row."""
        run, progress = self.run, self.run.progress
        step = StepId(self.phase, progress.cursor.step + 1)
        staleness = [
            self.bound.staleness(oldest, trainer=progress.cursor.step)
            for group in groups
            if (oldest := group.oldest_position(self.position)) is not None
        ]
        run.book.ledger.forget_batch(step)
        seconds = waited_s + result.seconds
        self._report_step(result, groups, staleness)
        version = progress.cursor.policy[1] if progress.cursor.policy else 0
        run.complete_step(result, seconds=seconds)
        records = [group.finished[index] for group in groups for index in group.valid_indices()]
        if records:
            record_measurement(run.reporter, step_figures(records))
        worked_s = result.seconds + run.publishing.publish_s
        run.throughput.record_step(records, waited_s=waited_s, worked_s=worked_s)
        faults = StepFaults(
            sum(len(group.masked) for group in groups),
            progress.figures.retried - self._retried,
            run.book.ledger.discarded - self._dropped,
            progress.figures.resumed,
            run.book.ledger.lengths.lost_work_length_ratio,
        )
        self._count_faults()
        self._write_rollouts(groups)
        penalties = groups[0].penalties if groups else {}
        fields = policy_fields(result, records, staleness=staleness, faults=faults)
        set_behaviour_metrics(fields, rollouts=len(records))
        return (
            step_row(progress.position(), result, seconds=seconds)
            | {"policy_version": version, "rollout_seconds": round(waited_s, 3)}
            | fields
            | self._add_to_monitors(groups, entropy=result.entropy)
            | ({"penalised": len(penalties)} if penalties else {})
            | ({"quarantined": [g.group_id for g in groups]} if result.is_skipped else {})
        )

    def _report_step(
        self, result: StepResult, groups: Sequence[RolloutGroup], staleness: Sequence[int]
    ) -> None:
        progress, status = self.run.progress, self.run.reporter.status
        rewards = [g.finished[i].reward.reward for g in groups for i in g.valid_indices()]
        if rewards:  # a step whose rollouts were all lost has no reward
            status.reward_mean = mean(rewards)
            figures, new = progress.figures, status.reward_mean
            previous = figures.reward_ewma if progress.cursor.step else new
            figures.reward_ewma = previous + REWARD_EWMA * (new - previous)
        status.mismatch = result.mismatch_mean
        status.staleness_max = max(staleness, default=0)
        status.staleness_p50 = sorted(staleness)[len(staleness) // 2] if staleness else 0
        set_policy_metrics(result)
        metrics.REWARD.set(status.reward_mean)
        for positions in staleness:
            metrics.STALENESS.observe(positions)

    def _write_rollouts(self, groups: Sequence[RolloutGroup]) -> None:
        records = [group.finished[index] for group in groups for index in sorted(group.finished)]
        step = self.run.progress.cursor.global_step
        self.run.dispatcher.write_rollouts(step, "train", records)


def _sibling_records(groups: Sequence[RolloutGroup]) -> list[list[journal_pb2.JournalRollout]]:
    """Finished rollouts of groups, siblings by index."""
    return [[group.finished[index] for index in sorted(group.finished)] for group in groups]
