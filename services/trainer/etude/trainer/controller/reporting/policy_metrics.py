"""Metrics of a policy step: how far the policy is from the weights that sampled."""

from etude.trainer import metrics
from etude.trainer.learner.batches import StepResult


def set_policy_metrics(result: StepResult) -> None:
    """Set the gauges of the last policy step; figures that it does not have are 0."""
    figures = result.extra
    metrics.ENTROPY.set(result.entropy)
    metrics.MISMATCH.set(result.mismatch_mean)
    metrics.MISMATCH_P99.set(figures.get("mismatch_p99", 0.0))
    metrics.CLIP_FRACTION.set(result.clip_fraction)
    metrics.MASKED_FRACTION.set(figures.get("masked_fraction", 0.0))
    metrics.EFFECTIVE_SAMPLE_SIZE.set(figures.get("effective_sample_size", 0.0))
