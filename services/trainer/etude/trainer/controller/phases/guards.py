"""Guards of a step: too many lost rollouts, or a mismatch between engine and learner."""

from collections.abc import Mapping, Sequence

from etude.common.api.run.phases import AsyncLimits, AsyncMode, RolloutPolicy
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.progress import RunFailedError, RunProgress
from etude.trainer.learner.batches import StepResult

MAX_MISMATCH: Mapping[str, float] = {"Float32": 1e-3, "BFloat16": 0.1}
"""Largest mean |sampler - trainer log-prob| by weights.dtype, where both have the same weights.

With fp32 1e-5 is usual. bf16 keeps 8 bits: logits of about 10 are off by up to 0.03, and so are
their differences. A wrongly loaded tensor gives 1 and more in either."""


class MismatchError(RunFailedError):
    """Engine and learner do not compute the same policy."""

    reason = "SamplerMismatch"


class InfraFailuresError(RunFailedError):
    """The platform lost more rollouts than the run allows."""

    reason = "InfraFailures"


def check_faults(
    progress: RunProgress, groups: Sequence[RolloutGroup], limits: RolloutPolicy
) -> None:
    """Refuse a batch with too many lost rollouts.

    Raises:
        InfraFailuresError: more were lost than the run allows.
    """
    masked = sum(len(group.masked) for group in groups)
    total = sum(len(group.finished) for group in groups)
    if 100 * masked > limits.max_infra_failure_percent * total:
        reasons = sorted({g.finished[i].reward.fault.message for g in groups for i in g.masked})
        raise InfraFailuresError(
            f"step {progress.cursor.step + 1}: {masked} of {total} rollouts were lost,"
            f" more than maxInfraFailurePercent {limits.max_infra_failure_percent}."
            f" First reason: {reasons[0][:300]}"
        )


def check_mismatch(progress: RunProgress, result: StepResult) -> None:
    """Refuse a step whose samples come from other weights; valid only for the published weights.

    Raises:
        MismatchError: engine and learner disagree.
    """
    limits = progress.phase.async_limits or AsyncLimits()
    most = MAX_MISMATCH[progress.resolved.spec.weights.dtype]
    # Other modes also train tokens of older versions, which differ legitimately.
    if limits.mode == AsyncMode.SYNC and result.mismatch_mean > most:
        raise MismatchError(
            f"step {progress.cursor.step + 1}: engine and learner log-probs differ by"
            f" {result.mismatch_mean:.3g} on average (limit {most}); the engine does"
            " not serve the published weights. Nothing was published from this step"
        )
