"""Requests and states of releases as messages of the wire."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from etude.common.errors import InvalidFieldError
from etude.common.evaluation.comparison import PairedDifference, SampleCounts
from etude.common.feedback.events import first_problem
from etude.common.release.channels import ServedVersion
from etude.common.weights import VersionId
from etude.feedback.release.decision import DecisionCase
from etude.feedback.release.evidence import GateEvidence
from etude.feedback.release.records import ReleaseRecord
from etude.feedback.release.state import CanaryState
from etude.v1 import release_pb2

M = TypeVar("M", bound=BaseModel)


def build(model: type[M], **fields: object) -> M:
    """Build a request from fields of a message.

    Raises:
        InvalidFieldError: naming the first field that is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problem: InvalidFieldError = first_problem(error)
        raise problem from None


def read_version(message: release_pb2.ServedPolicyVersion) -> ServedVersion:
    """Version that a message names.

    Raises:
        InvalidFieldError: it names none.
    """
    version = message.version
    return build(
        ServedVersion,
        run_uid=message.run_uid,
        epoch=version.epoch,
        number=version.number,
        checkpoint=message.checkpoint,
    )


def read_gate(message: release_pb2.ProposeRequest) -> GateEvidence:
    """Evidence for the gate.

    Raises:
        InvalidFieldError: a figure is none of a comparison.
    """
    return build(
        GateEvidence,
        compared_with=read_version(message.compared_with),
        comparisons={each.metric: _read_comparison(each) for each in message.comparisons},
        findings=tuple(message.findings),
    )


def _read_comparison(message: release_pb2.MetricComparison) -> PairedDifference:
    return PairedDifference(
        num_tasks=message.num_tasks,
        num_unpaired=message.num_unpaired,
        difference=message.difference,
        low=message.low,
        high=message.high,
        candidate_samples=_read_samples(message.candidate_samples),
        served_samples=_read_samples(message.served_samples),
    )


def _read_samples(message: release_pb2.TaskSamples) -> SampleCounts:
    return SampleCounts(message.expected, message.scored)


def write_decision(record: ReleaseRecord) -> release_pb2.ReleaseDecision:
    """A decision as callers see it."""
    return release_pb2.ReleaseDecision(
        number=record.number,
        action=record.action,
        sentence=record.sentence,
        evidence=record.evidence,
        decided_unix_ms=record.decided_ms,
    )


def write_status(
    case: DecisionCase, decisions: Sequence[ReleaseRecord]
) -> release_pb2.GetReleaseStatusResponse:
    """State of a route's releases as callers see it."""
    state = case.state
    return release_pb2.GetReleaseStatusResponse(
        policy=case.rules.policy.value,
        freeze=case.freeze,
        stable=_write_version(state.stable),
        previous=_write_version(state.previous),
        canary=_write_canary(state.canary),
        decisions=map(write_decision, decisions),
    )


def _write_version(served: ServedVersion | None) -> release_pb2.ServedPolicyVersion | None:
    if served is None:
        return None
    return release_pb2.ServedPolicyVersion(
        run_uid=served.run_uid,
        version=VersionId(served.epoch, served.number).to_proto(),
        checkpoint=served.checkpoint,
    )


def _write_canary(canary: CanaryState | None) -> release_pb2.CanaryStatus | None:
    if canary is None:
        return None
    gain = f"better by {canary.gain}" if canary.gain else ""
    return release_pb2.CanaryStatus(
        candidate=_write_version(canary.candidate),
        experiment=canary.experiment,
        share=canary.share,
        started_unix_ms=canary.started_ms,
        question=canary.question or gain,
    )
