"""Inputs of a release decision: requests, looks at users' figures, findings of monitors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from etude.common.evaluation.comparison import PairedDifference
from etude.common.release.channels import ServedVersion
from etude.common.weights.protocol import records
from etude.feedback.experiments.verdict import CanaryData
from etude.feedback.release.rules import GateMetric

Words = Annotated[str, Field(max_length=256, pattern=r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$")]
"""One line of a person or a monitor, without characters that act on a terminal."""


class GateEvidence(BaseModel):
    """Figures of an evaluation of the candidate against the version in use."""

    model_config = records.STRICT

    compared_with: ServedVersion
    comparisons: Annotated[Mapping[GateMetric, PairedDifference], Field(max_length=64)]
    """Candidate minus the version in use, by metric."""
    findings: Annotated[tuple[Words, ...], Field(max_length=64)] = ()
    """Of monitors and attack suites that are not quiet."""

    @field_validator("comparisons")
    @classmethod
    def _check_figures(
        cls, comparisons: Mapping[str, PairedDifference]
    ) -> Mapping[str, PairedDifference]:
        """Refuse figures that no comparison has.

        Raises:
            ValueError: naming the metric.
        """
        for metric, each in comparisons.items():
            counts = (each.num_tasks, each.num_unpaired)
            samples = (each.candidate_samples, each.served_samples)
            is_counted = min(counts) >= 0 and all(0 <= s.scored <= s.expected for s in samples)
            is_ordered = -math.inf < each.low <= each.difference <= each.high < math.inf
            if not (is_counted and is_ordered):
                raise ValueError(f"{metric}: bounds or counts are not those of a comparison")
        return comparisons


class ReleaseRequest(BaseModel):
    """Base of requests."""

    model_config = records.STRICT

    caller: Annotated[Words, Field(min_length=1)]
    reason: Words = ""


class ProposeRequest(ReleaseRequest):
    """Try a candidate with users."""

    candidate: ServedVersion
    gate: GateEvidence


class PromoteRequest(ReleaseRequest):
    """Serve a version to everyone."""

    version: ServedVersion | None = None
    """None: the candidate under test."""
    without_gate: bool = False
    """Allow a version that passed no gate."""


class RollbackRequest(ReleaseRequest):
    """Stop to serve a version."""

    version: ServedVersion | None = None
    """None: the candidate under test; without one, the version in use."""


class FreezeRequest(ReleaseRequest):
    """Allow roll-backs alone."""


class UnfreezeRequest(ReleaseRequest):
    """End a freeze."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLook:
    """Figures of the users of both arms."""

    experiment: str
    """Of the users."""
    data: CanaryData
    """Without earlier looks, which the state has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorFindings:
    """Sentences of the monitors that a window raised."""

    window: int
    sentences: tuple[str, ...]


Request = ProposeRequest | PromoteRequest | RollbackRequest | FreezeRequest | UnfreezeRequest
Evidence = Request | CanaryLook | MonitorFindings
