"""Accounting of windows of production rollouts: status, metrics, and rows of the record.

Rows have figures and no transcripts: an erasure reaches the feedback store, and not these.
"""

from collections import Counter
from dataclasses import dataclass, field

from etude.common.feedback.windows import WindowManifest
from etude.trainer import metrics
from etude.trainer.controller.admission.windows import Refusal
from etude.trainer.controller.journal.ledger import StepId
from etude.trainer.controller.reporting.policy_metrics import set_policy_metrics
from etude.trainer.controller.reporting.rows import Row, mean, step_row
from etude.trainer.controller.run import Run
from etude.trainer.learner.batches import PolicyBatch, StepResult

WAITING = "WaitingForWindow"
"""Reason of a run's status while there is no window to train."""

MAX_FINDINGS = 8
"""Sentences of monitors in one event."""


@dataclass(slots=True)
class WindowFigures:
    """Figures of a window that this controller trains."""

    manifest: WindowManifest
    age_s: float
    """Since it was closed, when its turn came."""
    masked: Counter[str] = field(default_factory=Counter)
    """Rollouts by reason."""
    trained: int = 0
    """Rollouts."""
    steps: int = 0
    divergence: float = 0.0
    """Newest mean KL of the policy from the version that served the window, in nats per token."""
    ended_by: str = ""
    """Reason to drop the rest; empty if there was none."""

    def row(self) -> Row:
        """The window's fields of a row."""
        return {
            "number": self.manifest.number,
            "policy": str(self.manifest.policy),
            "age_seconds": round(self.age_s, 3),
            "rollouts": len(self.manifest.rollouts),
            "trained": self.trained,
            "masked": dict(self.masked),
            "excluded": dict(Counter(each.reason for each in self.manifest.exclusions)),
            "steps": self.steps,
            "kl": self.divergence,
            "ended_by": self.ended_by,
            "findings": list(self.manifest.findings),
        }


@dataclass(slots=True)
class WindowAccounting:
    """Accounts for the windows of one phase, and for their steps."""

    run: Run
    phase: str
    """Name of the phase."""

    def report_wait(self, uri: str, after: int) -> None:
        """Say that the run waits for the window behind one."""
        status, message = self.run.reporter.status, f"waiting for window {after + 1} of {uri}"
        if (status.reason, status.message) == (WAITING, message):
            return
        if not status.reason or status.reason == WAITING:  # a failure of the store goes first
            status.reason, status.message = WAITING, message
            self.run.reporter.record_event(WAITING, message)
        self.run.reporter.update_status()

    def end_wait(self) -> None:
        """Say that the wait is over."""
        status = self.run.reporter.status
        if status.reason == WAITING:
            status.reason = status.message = ""
            self.run.reporter.update_status()

    def account_refusal(
        self, number: int, refusal: Refusal, manifest: WindowManifest | None
    ) -> None:
        """Account for a window of which nothing is trained."""
        metrics.WINDOWS.labels(outcome=refusal.reason).inc()
        message = f"window {number} is not trained: {refusal.sentence}"
        frozen = refusal.reason == "frozen_window"
        reason = "WindowFrozen" if frozen else "WindowDropped"
        self.run.reporter.record_event(reason, message, warning=True)
        rollouts = len(manifest.rollouts) if manifest is not None else 0
        self.run.reporter.recorder.add_row(
            self.run.progress.position().row(
                "window",
                number=number,
                policy=str(manifest.policy) if manifest is not None else "",
                rollouts=rollouts,
                trained=0,
                ended_by=refusal.reason,
                findings=list(manifest.findings) if manifest is not None else [],
            )
        )

    def account_step(self, result: StepResult, batch: PolicyBatch, figures: WindowFigures) -> None:
        """Account for a trained slice of a window, whose divergence is that of before the step."""
        run, rewards = self.run, batch.rewards.tolist()
        run.book.ledger.forget_batch(StepId(self.phase, run.progress.cursor.step + 1))
        figures.steps += 1
        figures.trained += len(rewards)
        status = run.reporter.status
        if rewards:
            status.reward_mean = mean(rewards)
        status.mismatch = result.mismatch_mean
        set_policy_metrics(result)
        metrics.REWARD.set(status.reward_mean)
        run.complete_step(result, seconds=result.seconds)
        run.reporter.recorder.add_row(
            step_row(run.progress.position(), result, seconds=result.seconds)
            | {
                "window": figures.manifest.number,
                "policy": str(figures.manifest.policy),
                "kl": figures.divergence,
                "reward_mean": mean(rewards),
                "rollouts": len(rewards),
                "entropy": result.entropy,
                "clip_fraction": result.clip_fraction,
                "mismatch_mean": result.mismatch_mean,
                "mismatch_max": result.mismatch_max,
                "mismatch_current": result.mismatch_current,
                "mismatch_current_tokens": result.current_tokens,
                "update_seconds": round(result.seconds, 3),
                "extra": dict(result.extra),
            }
        )

    def account_window(self, figures: WindowFigures) -> None:
        """Account for a window that was trained at least in part."""
        manifest = figures.manifest
        metrics.WINDOWS.labels(outcome=figures.ended_by or "trained").inc()
        metrics.WINDOW_AGE.set(figures.age_s)
        metrics.WINDOW_KL.set(figures.divergence)
        for reason, count in figures.masked.items():
            metrics.WINDOW_MASKED.labels(reason=reason).inc(count)
        message = (
            f"window {manifest.number} of version {manifest.policy}: {figures.trained} of"
            f" {len(manifest.rollouts)} rollouts in {figures.steps} steps,"
            f" KL {figures.divergence:.3g}"
        )
        if figures.ended_by:
            message += f"; the rest is dropped: {figures.ended_by}"
        if figures.masked:
            message += f"; masked: {dict(figures.masked)}"
        for finding in manifest.findings[:MAX_FINDINGS]:
            message += f"; {finding}"
        self.run.reporter.record_event("WindowTrained", message)
        self.run.reporter.recorder.add_row(
            self.run.progress.position().row("window", **figures.row())
        )
