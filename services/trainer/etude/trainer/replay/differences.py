"""Comparison of a replayed step with its record. Pure."""

from collections.abc import Sequence

from etude.common.api.meta import Model
from etude.trainer.learner.batches import StepResult
from etude.trainer.replay.history import RecordedStep
from etude.v1 import journal_pb2

SHOWN_IDS = 3
"""Ids of rollouts that a difference names."""


class StepVerdict(Model):
    """Outcome of one replayed step."""

    global_step: int
    """Counted over all phases."""
    phase: str
    """Name of the phase."""
    step: int
    """Counted within the phase."""
    rollouts: int
    """Rollouts of its batch."""
    loss: float
    """As replayed."""
    grad_norm: float
    """As replayed."""
    weight_digest: str
    """As replayed."""
    differences: tuple[str, ...] = ()
    """Sentences that name each figure that is not the recorded one."""

    @property
    def is_same(self) -> bool:
        """True if every figure is the recorded one."""
        return not self.differences


def batch_ids(step: RecordedStep) -> list[str]:
    """Ids of the rollouts of a batch, in the order of training."""
    return [
        group.finished[index].rollout.rollout_id
        for group in step.groups
        for index in sorted(group.finished)
    ]


def judge_step(
    step: RecordedStep, result: StepResult, *, shown_ids: Sequence[str] | None
) -> StepVerdict:
    """Compare a replayed step with its record.

    Args:
        step: as recorded.
        result: of the replay.
        shown_ids: rollouts of the step in the run's readable record; None if there are none.
    """
    differences = _figure_differences(step.result, result)
    ids = batch_ids(step)
    if shown_ids is not None and sorted(shown_ids) != sorted(ids):
        differences.append(_describe_ids(set(ids), set(shown_ids)))
    differences += _earlier_differences(step.results)
    return StepVerdict(
        global_step=step.global_step,
        phase=step.phase.name,
        step=step.number,
        rollouts=len(ids),
        loss=result.loss,
        grad_norm=result.grad_norm,
        weight_digest=result.weight_digest,
        differences=tuple(differences),
    )


def _figure_differences(recorded: journal_pb2.JournalStep, result: StepResult) -> list[str]:
    """Name each figure that differs; equal means equal to the last bit."""
    pairs = {
        "loss": (recorded.loss, result.loss),
        "gradient norm": (recorded.grad_norm, result.grad_norm),
    }
    found = [
        f"{name} {new!r}, recorded {old!r} (off by {abs(new - old):.3g})"
        for name, (old, new) in pairs.items()
        if repr(new) != repr(old)
    ]
    if result.weight_digest != recorded.weight_digest:
        digests = f"{result.weight_digest[:16]}, recorded {recorded.weight_digest[:16]}"
        found.append(f"weight digest {digests}")
    if result.data_cursor != recorded.data_cursor:
        found.append(f"data position {result.data_cursor}, recorded {recorded.data_cursor}")
    return found


def _describe_ids(journaled: set[str], shown: set[str]) -> str:
    parts = []
    for ids, what in ((journaled - shown, "only journaled"), (shown - journaled, "only shown")):
        if ids:
            named = ", ".join(sorted(ids)[:SHOWN_IDS])
            parts.append(f"{len(ids)} {what} ({named}{', …' if len(ids) > SHOWN_IDS else ''})")
    return f"rollouts of the batch: {', '.join(parts)}"


def _earlier_differences(results: Sequence[journal_pb2.JournalStep]) -> list[str]:
    """Name a digest of an earlier training of this step, by a controller that was replaced."""
    last = results[-1].weight_digest
    others = sorted({each.weight_digest[:16] for each in results} - {last[:16]})
    if not others:
        return []
    return [f"the journal itself has digest {last[:16]} and before that {', '.join(others)}"]
