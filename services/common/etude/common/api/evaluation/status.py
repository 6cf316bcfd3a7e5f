"""Observed state of an EvalRun."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import NAMED, UniqueBy
from etude.common.api.status_types import Conditions, Count, Figure, StatusModel, Time
from etude.common.api.storage import Storage

MAX_SENTENCE = 240
Tally = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A count of rollouts or tasks, from a Job."""


class MetricResult(StatusModel):
    """One metric of a suite: the evaluated checkpoint minus the baseline, paired by task."""

    metric: Annotated[str, Field(max_length=32)]
    """As spec.comparison.margins names it; Attacks for the share of attacks that succeeded."""
    difference: Figure
    """Mean over the common tasks."""
    low: Figure
    """Lower 95 % bound."""
    high: Figure
    """Upper 95 % bound."""
    tasks: Tally = 0
    """Tasks of both."""
    unpaired: Tally = 0
    """Tasks with samples of one of them only, which are left out."""
    expected: Tally = 0
    """Planned rollouts."""
    scored: Tally = 0
    """Those with a value."""
    baseline_expected: Tally = 0
    """Planned rollouts of the baseline."""
    baseline_scored: Tally = 0
    """Those with a value."""


class SuiteResult(StatusModel):
    """Figures of one suite."""

    name: Annotated[str, Field(max_length=63)]
    """Its name in spec.suites."""
    tasks: Tally = 0
    """Tasks with a value."""
    samples: Tally = 0
    """Rollouts with a value."""
    lost: Tally = 0
    """Rollouts that the platform lost, after repetitions."""
    mean: Figure | None = None
    """Success: the mean over tasks of each task's mean; of attacks, the share that succeeded."""
    best_of: Figure | None = None
    """Mean over tasks of the expected best of bestOfSamples samples; absent for one sample."""
    best_of_samples: Tally = 0
    """Samples of which the best counts: the largest power of 2 that every task has."""
    reward: Figure | None = None
    """Mean reward of the run's rubric."""
    difference: Figure | None = None
    """Success minus that of the baseline, on the common tasks."""
    low: Figure | None = None
    """Lower 95 % bound of the difference."""
    verdict: Annotated[str, Field(max_length=32)] = ""
    """Passed, Refused or NotEnoughData; empty without a comparison."""
    sentence: Annotated[str, Field(max_length=MAX_SENTENCE)] = ""
    """The verdict with the figures that decided it."""
    comparisons: Annotated[tuple[MetricResult, ...], Field(max_length=6), UniqueBy("metric")] = ()
    """The differences that the margins are about, for a gate; left out of a result that is longer
    than what a pod hands over."""


class EvaluationResult(StatusModel):
    """Result of an evaluation, as its Job hands it over."""

    policy: Annotated[str, Field(max_length=32)] = ""
    """Policy version that sampled every counted token."""
    manifest_digest: Annotated[str, Field(max_length=64)] = ""
    """SHA-256 of that version's manifest, of which the engine checked every byte."""
    baseline_policy: Annotated[str, Field(max_length=32)] = ""
    """Policy version of the baseline; empty without a comparison."""
    suites: Annotated[tuple[SuiteResult, ...], Field(max_length=8), NAMED] = ()
    """Figures of each suite, in the order of the spec."""
    verdict: Annotated[str, Field(max_length=32)] = ""
    """Verdict over all suites: Passed if every suite passed, Refused if one is refused."""


class EvaluationSummary(StatusModel):
    """The figures of all suites, as kubectl shows them."""

    suites: Annotated[str, Field(max_length=512)] = ""
    """Names of the suites."""
    mean: Annotated[str, Field(max_length=512)] = ""
    """Mean success; with several suites one for each, in the order of suites."""
    best_of: Annotated[str, Field(max_length=512)] = ""
    """Best of several samples and their number, such as 0.75@4."""
    lost: Count = 0
    """Rollouts that the platform lost."""


class EvalRunStatus(EvaluationResult):
    """Observed state of an evaluation."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """One word, derived from the conditions; nothing is decided by it."""
    conditions: Conditions = ()
    """Facts, each with a reason."""
    summary: EvaluationSummary = Field(default_factory=EvaluationSummary)
    """Figures in short."""
    start_time: Time | None = None
    """When its Job was made."""
    completion_time: Time | None = None
    """When it was over."""
    results: Storage | None = None
    """Where its results lie, and how to reach them: evaluation.json, and for each suite its
    result.json and rollouts. They stay when this object is deleted."""
