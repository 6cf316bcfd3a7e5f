"""Guards of a step: too many lost rollouts, or a mismatch between engine and learner."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from etude.common.api.run.async_limits import AsyncLimits, AsyncMode
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.progress import RunFailedError, RunProgress
from etude.trainer.learner.batches import StepResult

MAX_MISMATCH: Mapping[str, float] = {"Float32": 1e-3, "BFloat16": 0.1}
"""Largest mean |sampler - trainer log-prob| by weights.dtype, where both have the same weights.

With fp32 1e-5 is usual. bf16 keeps 8 bits: logits of about 10 are off by up to 0.03, and so are
their differences. A wrongly loaded tensor gives 1 and more in either."""


MAX_STALE_MISMATCH = 1.0
"""Largest mean |sampler - trainer log-prob| over all tokens of a step, in nats, in every mode.

A policy that moves this far within the staleness bound has ratios of e on average, which TIS with
high 2 cuts nearly everywhere; a wrongly loaded tensor gives as much."""

FEWEST_TOKENS: Mapping[str, int] = {"Float32": 1, "BFloat16": 256}
"""Tokens of the current version that a verdict needs, by weights.dtype; fewer are kept for the next
step. Single tokens of bf16 differ by a nat now and then, which 256 others outweigh."""

LOST_TOKENS = "its tokens are gone from the store, or damaged"
"""Fault of a rollout that was lost after it had its reward."""


class MismatchError(RunFailedError):
    """Engine and learner do not compute the same policy."""

    reason = "SamplerMismatch"


class InfraFailuresError(RunFailedError):
    """The platform lost more rollouts than the run allows."""

    reason = "InfraFailures"


def check_faults(
    progress: RunProgress,
    groups: Sequence[RolloutGroup],
    limits: RolloutPolicy,
    *,
    damaged: Collection[str] = (),
) -> None:
    """Refuse a batch with too many lost rollouts.

    Args:
        progress: of the run.
        groups: of the batch.
        limits: of the phase.
        damaged: for each rollout that is to be masked because it cannot be read, the reason.

    Raises:
        InfraFailuresError: more were lost than the run allows.
    """
    masked = sum(len(group.masked) for group in groups) + len(damaged)
    total = sum(len(group.finished) for group in groups)
    if 100 * masked > limits.max_infra_failure_percent * total:
        faults = {g.finished[i].reward.fault.message for g in groups for i in g.masked}
        reasons = [f"{LOST_TOKENS}: {each}" for each in damaged]
        reasons += sorted(each or LOST_TOKENS for each in faults)
        raise InfraFailuresError(
            f"step {progress.cursor.step + 1}: {masked} of {total} rollouts were lost,"
            f" more than maxInfraFailurePercent {limits.max_infra_failure_percent}."
            f" First reason: {reasons[0][:300]}"
        )


@dataclass(slots=True)
class MismatchGuard:
    """Compares the log-probs of sampler and trainer at each step, in every mode.

    Tokens that the step's very weights sampled must agree but for rounding. Tokens of older
    weights differ legitimately; by a nat per token they are of no use, or of other weights.
    """

    progress: RunProgress
    _sum: float = 0.0
    """Of |sampler - trainer log-prob| over tokens that are not judged yet."""
    _tokens: int = 0

    def check(self, result: StepResult) -> None:
        """Refuse a step whose samples come from other weights than the published ones.

        Raises:
            MismatchError: engine and learner disagree.
        """
        if result.is_skipped:  # its figures are of a pass that was not finite
            return
        dtype = self.progress.resolved.spec.weights.dtype
        self._sum += result.current_tokens * (result.mismatch_current or 0.0)
        self._tokens += result.current_tokens
        if self._tokens >= FEWEST_TOKENS[dtype]:
            mean, self._sum, self._tokens = self._sum / self._tokens, 0.0, 0
            if not mean <= MAX_MISMATCH[dtype]:
                raise self._error(
                    f"{mean:.3g} on average over tokens of the current version (limit"
                    f" {MAX_MISMATCH[dtype]}); the engine does not serve the published weights"
                )
        if not result.mismatch_mean <= MAX_STALE_MISMATCH:
            limits = self.progress.phase.async_limits or AsyncLimits()
            drift = (
                ", or the policy moves too far within maxStalenessVersions: lower"
                " optimizer.learningRate"
            )
            raise self._error(
                f"{result.mismatch_mean:.3g} on average over all tokens (limit"
                f" {MAX_STALE_MISMATCH}); the engine does not serve the published weights"
                f"{'' if limits.mode == AsyncMode.SYNC else drift}"
            )

    def _error(self, what: str) -> MismatchError:
        step = self.progress.cursor.step + 1
        return MismatchError(
            f"step {step}: engine and learner log-probs differ by {what}."
            " Nothing was published from this step"
        )
