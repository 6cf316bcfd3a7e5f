"""Progress of a run: active phase, cursor, running figures, step times, throughput."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from etude.common.api.run.phases import Phase
from etude.common.errors import EtudeError
from etude.common.role_inputs import ResolvedRun
from etude.trainer.controller.checkpoints.state import Cursor, Figures, MonitorHistory
from etude.trainer.controller.reporting.rows import RowPosition
from etude.v1 import journal_pb2, run_pb2

KEPT_STEP_TIMES = 200

FEWEST_STEPS = 3
"""Fewest steps from which the median is reported."""


class RunFailedError(EtudeError):
    """The run cannot continue, and a restart would not help."""

    reason: ClassVar[str] = "RunFailed"


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """Position of a run in its spec, and its running figures."""

    resolved: ResolvedRun
    epoch: int
    cursor: Cursor
    figures: Figures
    clock: Callable[[], float] = time.time
    progress_s: float = field(default_factory=time.monotonic)
    """Time of the last progress, for the watchdog."""

    @property
    def phase(self) -> Phase:
        return next(p for p in self.resolved.spec.phases if p.name == self.cursor.phase)

    @property
    def last_step(self) -> int:
        """Last step of the active phase, as far as that is known."""
        return self.cursor.ends.get(self.cursor.phase, self.phase.max_steps)

    def position(self) -> RowPosition:
        cursor = self.cursor
        return RowPosition(
            time_s=self.clock(),
            phase=cursor.phase,
            step=cursor.step,
            global_step=cursor.global_step,
        )

    def mark_progress(self) -> None:
        self.progress_s = time.monotonic()

    def enter_phase(self, phase: Phase) -> None:
        cursor = self.cursor
        if cursor.phase != phase.name or phase.name not in cursor.starts:
            cursor.phase, cursor.step, cursor.data = phase.name, 0, ""
            cursor.starts[phase.name] = cursor.global_step
            self.figures.step_seconds, self.figures.window = [], []
            self.figures.monitors = MonitorHistory()

    def complete_step(self, seconds: float, data_cursor: str = "") -> None:
        """Advance by one optimiser step that took this long, and streamed data to this position."""
        cursor, figures = self.cursor, self.figures
        cursor.step += 1
        cursor.data = data_cursor
        cursor.global_step += 1
        figures.productive_seconds += seconds
        figures.step_seconds = [*figures.step_seconds, round(seconds, 4)][-KEPT_STEP_TIMES:]
        self.mark_progress()

    def write_status(self, status: run_pb2.RunStatus) -> None:
        cursor, figures = self.cursor, self.figures
        status.phase, status.step = cursor.phase, cursor.step
        status.target_step = self.phase.max_steps
        del status.phases[:]
        status.phases.extend(phase_progress(cursor, self.resolved.spec.phases))
        status.policy_version = cursor.policy[1] if cursor.policy else 0
        status.reward_ewma = figures.reward_ewma
        status.productive_seconds = figures.productive_seconds
        status.step_seconds_p99 = slow_step_s(figures.step_seconds)
        status.step_seconds_p50 = median_step_s(figures.step_seconds)
        if figures.eval_success is not None:
            status.eval_success = figures.eval_success


def median_step_s(step_seconds: Sequence[float]) -> float:
    """Median time of the newest steps; 0 while there are too few."""
    return statistics.median(step_seconds) if len(step_seconds) >= FEWEST_STEPS else 0.0


def slow_step_s(step_seconds: list[float]) -> float:
    """99th percentile of step times."""
    if not step_seconds:
        return 0.0
    return sorted(step_seconds)[min(len(step_seconds) - 1, int(len(step_seconds) * 0.99))]


def phase_progress(cursor: Cursor, phases: Sequence[Phase]) -> Iterator[run_pb2.PhaseProgress]:
    """Progress of the started phases, in order."""
    started = [phase for phase in phases if phase.name in cursor.starts]
    if not started:
        return
    ends = [cursor.starts[phase.name] for phase in started[1:]] + [cursor.global_step]
    for phase, end in zip(started, ends, strict=True):
        yield run_pb2.PhaseProgress(
            name=phase.name,
            step=end - cursor.starts[phase.name],
            target_step=phase.max_steps,
            is_done=phase.name in cursor.finished,
            gate=cursor.gates.get(phase.name, ""),
        )


THROUGHPUT_EWMA = 0.3
"""Weight of the newest step: three steps make up most of a figure."""


@dataclass(slots=True)
class Throughput:
    """Smoothed figures of the newest reinforcement-learning steps."""

    tokens: float = 0.0
    wait_s: float = 0.0
    work_s: float = 0.0

    def record_step(
        self, records: Iterable[journal_pb2.JournalRollout], *, waited_s: float, worked_s: float
    ) -> None:
        """Record a step.

        Args:
            records: rollouts that it trained.
            waited_s: wait for its rollouts; 0 for a step that is replayed from the journal, which
                is not counted.
            worked_s: duration of the rest.
        """
        if waited_s <= 0:
            return
        tokens = float(sum(record.rollout.costs.completion_tokens for record in records))
        weight = THROUGHPUT_EWMA if self.tokens else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.wait_s += weight * (waited_s - self.wait_s)
        self.work_s += weight * (worked_s - self.work_s)

    def write_status(self, status: run_pb2.RunStatus) -> None:
        status.step_tokens, status.wait_seconds = self.tokens, self.wait_s
        status.work_seconds = self.work_s
