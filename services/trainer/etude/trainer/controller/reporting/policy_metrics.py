"""Metrics of a step: load of experts, distance from the sampler, and behaviour of rollouts."""

import math

from etude.trainer import metrics
from etude.trainer.controller.reporting.behaviour import TOKEN_KINDS, TRAJECTORY_FIGURES
from etude.trainer.controller.reporting.rows import Row
from etude.trainer.learner.batches import StepResult


def set_expert_metrics(result: StepResult) -> None:
    """Set the gauges of the load of experts, where a step has some."""
    gauges = {
        "expert_load_ratio": metrics.EXPERT_LOAD_RATIO,
        "expert_load_entropy": metrics.EXPERT_LOAD_ENTROPY,
    }
    for name, gauge in gauges.items():
        for layers, figure in (("mean", name), ("worst", f"{name}_worst")):
            if figure in result.extra:
                gauge.labels(layers=layers).set(result.extra[figure])


def set_policy_metrics(result: StepResult) -> None:
    """Set the gauges of the last policy step; figures that it does not have are 0.

    The replayed fraction is left as it is: 0 would say that a replay fails.
    """
    figures = result.extra
    metrics.ENTROPY.set(result.entropy)
    metrics.MISMATCH.set(result.mismatch_mean)
    metrics.MISMATCH_P99.set(figures.get("mismatch_p99", 0.0))
    metrics.MISMATCH_KL.set(figures.get("mismatch_k3", 0.0))
    if "replayed_fraction" in figures:
        metrics.REPLAYED_FRACTION.set(figures["replayed_fraction"])
    metrics.UNRECORDED_ROLLOUTS.inc(figures.get("unrecorded_rollouts", 0.0))
    metrics.READ_SECONDS.set(figures.get("read_seconds", 0.0))
    if "fetched_fraction" in figures:
        metrics.FETCHED_FRACTION.set(figures["fetched_fraction"])
    metrics.CLIP_FRACTION.set(result.clip_fraction)
    metrics.MASKED_FRACTION.set(figures.get("masked_fraction", 0.0))
    metrics.EFFECTIVE_SAMPLE_SIZE.set(figures.get("effective_sample_size", 0.0))


def set_behaviour_metrics(row: Row, *, rollouts: int) -> None:
    """Set the gauges of behaviour from a policy step's row.

    A figure that its rollouts do not have is NaN, which charts leave out.

    Args:
        row: of the step.
        rollouts: that the row's sums are over.
    """
    for name in TRAJECTORY_FIGURES:
        metrics.BEHAVIOUR.labels(figure=name).set(row.get(name, math.nan))
    for kind in TOKEN_KINDS:
        mean = row[f"{kind}_tokens"] / rollouts if rollouts else math.nan
        metrics.ROLLOUT_TOKENS.labels(kind=kind).set(mean)
