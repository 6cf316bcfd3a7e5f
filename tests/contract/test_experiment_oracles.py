"""Our statistics of experiments against other projects': gbstats of GrowthBook and statsmodels."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.support.oracles import Oracle

from etude.feedback.experiments.msprt import sequence_margin
from etude.feedback.experiments.user_moments import Difference, UserMoments, compare_arms
from etude.feedback.experiments.verdict import split_p_value

ORACLE = Oracle(
    requirements=("gbstats==0.8.0", "statsmodels==0.15.0", "pandas", "scipy", "numpy"),
    # gbstats asks for numpy and pandas of 2023, and for what its server needs.
    overrides=("numpy", "pandas", "scipy"),
)
SCRIPT = """
import json, math, sys
import numpy as np
import statsmodels.api as sm
from gbstats.frequentist.tests import (
    FrequentistConfig, SequentialConfig, SequentialTwoSidedTTest, TwoSidedTTest)
from gbstats.models.statistics import (
    RatioStatistic, RegressionAdjustedStatistic, SampleMeanStatistic)
from scipy.stats import betabinom, binom


def mean(values):
    return SampleMeanStatistic(
        n=len(values), sum=float(values.sum()), sum_squares=float((values**2).sum()))


def difference(test):
    return {"value": float(test.point_estimate), "variance": float(test.variance)}


given = json.loads(sys.stdin.readline())
arms = [{key: np.array(values) for key, values in arm.items()} for arm in given["arms"]]
answer = {}
means = [mean(arm["kept"]) for arm in arms]
absolute = {"difference_type": "absolute"}
answer["mean"] = difference(TwoSidedTTest(*means, FrequentistConfig(**absolute)))
ratios = [
    RatioStatistic(n=len(arm["kept"]),
                   m_statistic=mean(arm["kept"]), d_statistic=mean(arm["shown"]),
                   m_d_sum_of_products=float(arm["kept"] @ arm["shown"]))
    for arm in arms]
answer["ratio"] = difference(TwoSidedTTest(*ratios, FrequentistConfig(**absolute)))

arm_of = np.concatenate([np.full(len(arm["kept"]), index) for index, arm in enumerate(arms)])
both = {key: np.concatenate([arm[key] for arm in arms]) for key in arms[0]}
regression = sm.OLS(both["kept"], sm.add_constant(np.stack([arm_of, both["history"]], 1))).fit()
theta = float(regression.params[2])
answer["regression"] = float(regression.params[1])
adjusted = [
    RegressionAdjustedStatistic(
        n=len(arm["kept"]), post_statistic=mean(arm["kept"]), pre_statistic=mean(arm["history"]),
        post_pre_sum_of_products=float(arm["kept"] @ arm["history"]), theta=theta)
    for arm in arms]
answer["adjusted"] = difference(TwoSidedTTest(*adjusted, FrequentistConfig(**absolute)))

user_of = np.repeat(np.arange(len(arm_of)), both["shown"].astype(int))
events = np.concatenate([
    np.arange(shown) < kept
    for kept, shown in zip(both["kept"].astype(int), both["shown"].astype(int))]).astype(float)
clusters = sm.OLS(events, sm.add_constant(arm_of[user_of].astype(float))).fit(
    cov_type="cluster", cov_kwds={"groups": user_of, "use_correction": False})
answer["clusters"] = {"value": float(clusters.params[1]), "variance": float(clusters.bse[1] ** 2)}

config = SequentialConfig(sequential_tuning_parameter=5000, **absolute)
sequential = SequentialTwoSidedTTest(*ratios, config)
low, high = sequential.confidence_interval
answer["sequence"] = {
    "margin": float(high - low) / 2,
    "tau": float(sequential.rho) * math.sqrt(float(sequential.variance) * len(arm_of)),
    "variance": float(sequential.variance)}
control, treatment = given["split"]
total = control + treatment
answer["split"] = float(np.exp(
    binom.logpmf(control, total, 0.5) - betabinom.logpmf(control, total, 50, 50)))
print(json.dumps(answer))
"""
RNG = np.random.default_rng(11)
SPLIT = (10_330, 9_770)


def draw_arm(users: int, rate: float) -> dict[str, np.ndarray]:
    shown = RNG.geometric(0.2, users)
    taste = RNG.beta(4 * rate, 4 * (1 - rate), users)
    kept = RNG.binomial(shown, taste)
    return {"kept": kept, "shown": shown, "history": taste + RNG.normal(0, 0.1, users)}


ARMS = (draw_arm(1_500, 0.6), draw_arm(1_200, 0.63))


@cache
def answers() -> dict[str, Any]:
    arms = [{key: values.tolist() for key, values in arm.items()} for arm in ARMS]
    found: dict[str, Any] = ORACLE.answers(SCRIPT, [{"arms": arms, "split": SPLIT}])[0]
    return found


def compare(
    numerator: str, denominator: str | None = None, history: str | None = None
) -> Difference:
    """Our difference of the arms by columns of their users."""
    control, treatment = (
        UserMoments.from_users(
            arm[numerator],
            None if denominator is None else arm[denominator],
            None if history is None else arm[history],
        )
        for arm in ARMS
    )
    return compare_arms(control, treatment)


@pytest.mark.parametrize(("theirs", "columns"), [("mean", ("kept",)), ("ratio", ("kept", "shown"))])
def test_differences_and_variances_are_those_of_gbstats(
    theirs: str, columns: tuple[str, ...]
) -> None:
    found = compare(*columns)
    assert float(found.value) == pytest.approx(answers()[theirs]["value"], rel=1e-9)
    assert float(found.variance) == pytest.approx(answers()[theirs]["variance"], rel=1e-9)


def test_the_adjusted_difference_is_the_coefficient_of_a_regression() -> None:
    found = compare("kept", None, "history")
    assert float(found.value) == pytest.approx(answers()["regression"], rel=1e-9)
    # gbstats takes the slope over both arms together, and so a part of the difference with it.
    assert float(found.value) == pytest.approx(answers()["adjusted"]["value"], rel=2e-2)
    assert float(found.variance) == pytest.approx(answers()["adjusted"]["variance"], rel=1e-3)


def test_a_ratio_is_a_regression_of_events_with_errors_by_user() -> None:
    found, theirs = compare("kept", "shown"), answers()["clusters"]
    assert float(found.value) == pytest.approx(theirs["value"], rel=1e-9)
    # Without their correction for few clusters, which is ours for each arm.
    assert float(found.variance) == pytest.approx(theirs["variance"], rel=2e-3)


def test_the_confidence_sequence_is_that_of_gbstats() -> None:
    theirs, found = answers()["sequence"], compare("kept", "shown")
    assert float(found.variance) == pytest.approx(theirs["variance"], rel=1e-9)
    margin = float(sequence_margin(found, theirs["tau"], 0.05))
    assert margin == pytest.approx(theirs["margin"], rel=1e-9)


def test_the_evidence_for_an_even_split_is_that_of_two_binomial_models() -> None:
    assert answers()["split"] < 1
    assert split_p_value(*SPLIT) == pytest.approx(answers()["split"], rel=1e-6)
