"""Proposal of a candidate, from the result of its evaluation against the version in use."""

from etude.common.api.evaluation.spec import METRIC_NAMES
from etude.common.api.evaluation.status import EvaluationResult, MetricResult
from etude.common.errors import InvalidFieldError
from etude.common.weights import VersionId
from etude.v1 import release_pb2


def suite_metric(metric: str, suite: str) -> str:
    """Name of a metric of one suite in a proposal, such as `success of held-out`."""
    return f"{metric} of {suite}"


def build_proposal(
    result: EvaluationResult,
    stable: release_pb2.ServedPolicyVersion,
    *,
    run_uid: str,
    checkpoint: str,
) -> release_pb2.ProposeRequest:
    """Build the request of a candidate, without its caller.

    Args:
        result: of the candidate's evaluation.
        stable: the version in use, which is named as its service does.
        run_uid: run of both versions.
        checkpoint: name of the candidate's Checkpoint.

    Raises:
        InvalidFieldError: the result has no comparison.
    """
    if not result.baseline_policy:
        raise InvalidFieldError("comparison", "is missing, which a gate judges by")
    comparisons = [
        _comparison(suite.name, each) for suite in result.suites for each in suite.comparisons
    ]
    compared_with = _served(result.baseline_policy, run_uid, "baselinePolicy")
    if (compared_with.run_uid, compared_with.version) == (stable.run_uid, stable.version):
        compared_with = stable
    candidate = _served(result.policy, run_uid, "policy")
    candidate.checkpoint = checkpoint
    return release_pb2.ProposeRequest(
        candidate=candidate, compared_with=compared_with, comparisons=comparisons
    )


def _served(version: str, run_uid: str, field: str) -> release_pb2.ServedPolicyVersion:
    try:
        found = VersionId.parse(version).to_proto()
    except ValueError as error:
        raise InvalidFieldError(field, str(error)) from error
    return release_pb2.ServedPolicyVersion(run_uid=run_uid, version=found)


def _comparison(suite: str, found: MetricResult) -> release_pb2.MetricComparison:
    return release_pb2.MetricComparison(
        metric=suite_metric(METRIC_NAMES.get(found.metric, found.metric), suite),
        num_tasks=found.tasks,
        num_unpaired=found.unpaired,
        difference=float(found.difference),
        low=float(found.low),
        high=float(found.high),
        candidate_samples=release_pb2.TaskSamples(expected=found.expected, scored=found.scored),
        served_samples=release_pb2.TaskSamples(
            expected=found.baseline_expected, scored=found.baseline_scored
        ),
    )
