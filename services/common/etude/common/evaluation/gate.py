"""Decision of the evaluation gate: may a candidate go on to users?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.common.evaluation.comparison import PairedDifference, SampleCounts

MAX_UNPAIRED = 0.05
"""Largest share of the tasks that may lack samples of one policy."""


MAX_LOST = 0.05
"""Largest share of one policy's samples that may have no value."""
MAX_LOSS_Z = 2.33
"""Standard errors by which the candidate may lose more samples; one-sided p of 0.01."""


class GateVerdict(StrEnum):
    """Answer of the gate; only the first lets a candidate pass."""

    PASSED = "Passed"
    REFUSED = "Refused"
    NOT_ENOUGH_DATA = "NotEnoughData"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginRule:
    """Largest loss in one metric that a candidate may have."""

    metric: str
    margin: float
    """In the metric's unit; 0 asks for a gain, as of a branch on the tasks that it is for."""
    is_share: bool = True
    """True for values from 0 to 1, which sentences give in percentage points."""
    less_is_better: bool = False
    is_level: bool = False
    """True if the margin is the highest value of the candidate itself, and no served policy is
    compared: its bounds say whether the tasks are enough."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin of {self.metric} must not be below 0, got {self.margin}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """Result of one rule, as a sentence."""

    verdict: GateVerdict
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """Decision with the result of each rule, in the order of the rules."""

    verdict: GateVerdict
    results: tuple[RuleResult, ...]

    @property
    def sentence(self) -> str:
        """The decision and what decided it."""
        telling = [each.sentence for each in self.results if each.verdict is self.verdict]
        heads = {
            GateVerdict.PASSED: "passed",
            GateVerdict.REFUSED: "refused",
            GateVerdict.NOT_ENOUGH_DATA: "not enough data",
        }
        return f"{heads[self.verdict]}: {'; '.join(telling)}"


def decide_gate(
    comparisons: Mapping[str, PairedDifference],
    rules: Sequence[MarginRule],
    *,
    min_tasks: int,
    findings: Sequence[str] = (),
) -> GateDecision:
    """Decide about a candidate: every metric's lower bound has to be above its margin.

    All rules have to hold, so that no correction for their number is needed: each alone lets a
    candidate that loses its margin pass in 5 % of the cases at most. That holds for one look:
    an evaluation that is extended after NotEnoughData is a second chance.

    Args:
        comparisons: candidate minus served, by metric.
        rules: at least one.
        min_tasks: fewer common tasks decide nothing.
        findings: sentences of monitors and attack suites that are not quiet.

    Raises:
        ValueError: there is no rule.
    """
    if not rules:
        raise ValueError("a gate without rules would let everything pass")
    results = [RuleResult(verdict=GateVerdict.REFUSED, sentence=each) for each in findings]
    results += [_apply_rule(rule, comparisons.get(rule.metric), min_tasks) for rule in rules]
    verdicts = {each.verdict for each in results}
    for verdict in (GateVerdict.REFUSED, GateVerdict.NOT_ENOUGH_DATA):
        if verdict in verdicts:
            return GateDecision(verdict=verdict, results=tuple(results))
    return GateDecision(verdict=GateVerdict.PASSED, results=tuple(results))


def _apply_rule(
    rule: MarginRule, difference: PairedDifference | None, min_tasks: int
) -> RuleResult:
    missing = GateVerdict.NOT_ENOUGH_DATA
    if difference is None:
        return RuleResult(verdict=missing, sentence=f"{rule.metric} was not measured")
    if what := _describe_missing(difference, 1 if rule.is_level else min_tasks):
        return RuleResult(verdict=missing, sentence=f"{rule.metric} {what}")
    gain = difference.negate() if rule.less_is_better else difference
    sentence = _sentence(rule, gain)
    if gain.low > -rule.margin:
        return RuleResult(verdict=GateVerdict.PASSED, sentence=sentence)
    if gain.difference <= -rule.margin:
        return RuleResult(verdict=GateVerdict.REFUSED, sentence=sentence)
    return RuleResult(
        verdict=missing,
        sentence=f"{sentence}; about {_tasks_needed(rule, gain):,} tasks would decide",
    )


def _describe_missing(difference: PairedDifference, min_tasks: int) -> str:
    """Reason why a difference has too little data to be judged, or nothing."""
    tasks, unpaired = difference.num_tasks, difference.num_unpaired
    if tasks < min_tasks:
        return f"has {tasks:,} tasks of both policies, {min_tasks:,} are needed"
    if unpaired > MAX_UNPAIRED * (tasks + unpaired):
        return f"lacks one policy's samples of {unpaired:,} tasks beside {tasks:,} tasks of both"
    return _describe_losses(difference.candidate_samples, difference.served_samples)


def _describe_losses(candidate: SampleCounts, served: SampleCounts) -> str:
    """Reason why lost samples may hide a loss of the candidate, or nothing.

    The candidate may lose more by its own doing, and on the tasks that it would fail.
    """
    for name, each in (("candidate", candidate), ("served policy", served)):
        if each.lost > MAX_LOST * each.expected:
            return f"lacks {each.lost:,} of {each.expected:,} samples of the {name}"
    lost = candidate.lost + served.lost
    if not (candidate.expected and served.expected and lost):
        return ""
    pooled = lost / (candidate.expected + served.expected)
    error = math.sqrt(pooled * (1 - pooled) * (1 / candidate.expected + 1 / served.expected))
    excess = candidate.lost / candidate.expected - served.lost / served.expected
    if excess <= MAX_LOSS_Z * error:
        return ""
    return (
        f"lacks {candidate.lost:,} of {candidate.expected:,} samples of the candidate,"
        f" clearly more than {served.lost:,} of {served.expected:,} of the served policy"
    )


def _tasks_needed(rule: MarginRule, gain: PairedDifference) -> int:
    """Number of tasks, to two digits, with which the bound would reach the margin.

    It takes the difference as it is, and bounds that narrow with the root of the tasks.
    """
    ratio = (gain.difference - gain.low) / (gain.difference + rule.margin)
    return int(float(f"{gain.num_tasks * ratio**2:.2g}"))


def _sentence(rule: MarginRule, gain: PairedDifference) -> str:
    """The figures of a rule; a gain is positive also where less is better."""
    if rule.is_level:
        return (
            f"{rule.metric} succeed in {_share(-gain.difference)}, upper 95 % bound"
            f" {_share(-gain.low)}, level {_share(rule.margin)}, {gain.num_tasks:,} tasks"
        )
    word = "better" if gain.difference > 0 else "worse" if gain.difference < 0 else "equal"
    size = "" if word == "equal" else f" by {_amount(rule, abs(gain.difference))}"
    limit = f"margin {_amount(rule, -rule.margin)}" if rule.margin else "a gain is needed"
    return (
        f"{rule.metric} {word}{size}, lower 95 % bound {_amount(rule, gain.low)},"
        f" {limit}, {gain.num_tasks:,} tasks"
    )


def _share(value: float) -> str:
    return f"{100 * value + 0.0:.1f} %"


def _amount(rule: MarginRule, value: float) -> str:
    return f"{100 * value:.1f} points" if rule.is_share else f"{value:.3g}"
