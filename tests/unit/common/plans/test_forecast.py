"""How many environments will be wanted, against simulated waves."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.plans.forecast import (
    Quantile,
    RunningEnvironments,
    Supply,
    Wave,
    assurance,
    demand,
    held_environments,
    lead_s,
    peak,
    remaining_environments,
    start_probability,
    survival,
)

LEASE = (Quantile(0.5, 60.0), Quantile(0.9, 120.0), Quantile(0.99, 300.0))
seconds = st.floats(0, 1_000)
waves = st.builds(
    Wave,
    template=st.just("python"),
    count=st.integers(1, 64),
    start_s=seconds,
    sigma_s=st.floats(0, 100),
    lease=st.sampled_from([(), LEASE]),
)


def simulated(wave: Wave, at_s: float, random: Random) -> int:
    """One future: all start at one moment, and are held from the planned one, for their times."""
    start_s = random.gauss(wave.start_s, wave.sigma_s)
    if start_s > at_s:
        return 0
    return sum(at_s - wave.start_s < _held_s(random.random()) for _ in range(wave.count))


def _held_s(share: float) -> float:
    """The inverse of the distribution in LEASE."""
    points = [Quantile(0, 0), *LEASE, Quantile(1, 600)]
    for low, high in pairwise(points):
        if share <= high.share:
            part = (share - low.share) / (high.share - low.share)
            return low.seconds + part * (high.seconds - low.seconds)
    return 600.0


@pytest.mark.parametrize("at_s", [80.0, 100.0, 130.0, 180.0, 250.0])
def test_mean_and_variance_are_those_of_simulated_waves(at_s: float) -> None:
    wave = Wave(template="python", count=16, start_s=100.0, sigma_s=20.0, lease=LEASE)
    random = Random(7)
    found = [simulated(wave, at_s, random) for _ in range(20_000)]
    mean = sum(found) / len(found)
    variance = sum((x - mean) ** 2 for x in found) / len(found)

    expected = held_environments(wave, at_s)

    # Five standard errors of the mean of so many futures.
    error = 5 * math.sqrt(variance / len(found))
    assert expected.mean == pytest.approx(mean, abs=error + 1e-9)
    assert expected.variance == pytest.approx(variance, rel=0.06, abs=0.3)


def test_what_is_enough_in_95_of_100_cases_is_enough_in_about_as_many_simulated_ones() -> None:
    found = [
        Wave(template="python", count=8, start_s=10.0 * n, sigma_s=15.0, lease=LEASE)
        for n in range(30)
    ]
    random = Random(11)
    enough = demand(found, 200.0)
    futures = [sum(simulated(wave, 200.0, random) for wave in found) for _ in range(2_000)]

    assert sum(each <= enough for each in futures) / len(futures) == pytest.approx(0.95, abs=0.02)


@settings(deadline=None)
@given(st.lists(waves, max_size=6), seconds, st.floats(0, 300), st.floats(0, 300))
def test_more_time_never_means_less_demand_and_no_demand_exceeds_the_waves(
    found: list[Wave], now_s: float, near_s: float, far_s: float
) -> None:
    most = sum(wave.count for wave in found)
    kept = [Wave(template="python", count=w.count, start_s=w.start_s) for w in found]

    assert 0 <= peak(found, now_s, near_s) <= most
    assert peak(kept, now_s, near_s) <= peak(kept, now_s, near_s + far_s)


def test_a_wave_without_doubt_is_wanted_from_its_start() -> None:
    wave = Wave(template="python", count=16, start_s=10.0)

    assert demand([wave], 9.9) == 0
    assert demand([wave], 10.0) == 16
    assert peak([wave], 0.0, 9.0) == 0
    assert peak([wave], 0.0, 11.0) == 16


@given(waves, st.lists(seconds, min_size=2, max_size=2).map(sorted))
def test_starting_and_ending_go_one_way(wave: Wave, moments: list[float]) -> None:
    early_s, late_s = moments

    assert 0 <= start_probability(wave, early_s) <= start_probability(wave, late_s) <= 1
    assert 1 >= survival(wave.lease, early_s) >= survival(wave.lease, late_s) >= 0


@pytest.mark.parametrize(("age_s", "left"), [(0, 1), (60, 0.5), (90, 0.3), (300, 0.01), (600, 0)])
def test_as_many_leases_survive_as_the_quantiles_say(age_s: float, left: float) -> None:
    assert survival(LEASE, age_s) == pytest.approx(left)
    assert survival((), age_s) == 1


def test_more_environments_take_longer_to_be_ready() -> None:
    supply = Supply(start_s=2.0, ready=10, per_second=4.0)

    assert lead_s(40, supply) == pytest.approx(12.0)
    assert lead_s(0, supply) == lead_s(-5, supply) == pytest.approx(2.0)


@given(st.integers(1, 64), seconds, st.lists(seconds, min_size=2, max_size=2).map(sorted))
def test_of_those_held_fewer_stay_the_longer_one_looks_ahead(
    count: int, age_s: float, moments: list[float]
) -> None:
    running = RunningEnvironments(count=count, age_s=age_s, lease=LEASE)
    soon, late = (remaining_environments(running, after_s) for after_s in moments)

    assert count >= soon.mean >= late.mean >= 0
    assert remaining_environments(running, 0.0).mean == pytest.approx(count)


@given(waves, seconds, st.integers(0, 64), st.floats(0.5, 0.98))
def test_what_others_hold_is_wanted_beside_the_waves_and_more_certainty_costs_more(
    wave: Wave, at_s: float, count: int, share: float
) -> None:
    base = [remaining_environments(RunningEnvironments(count=count, age_s=0.0), 0.0)]
    surer = assurance(share + 0.01)

    assert demand([wave], at_s, base=base) == pytest.approx(demand([wave], at_s) + count)
    assert demand([wave], at_s, enough=assurance(share)) <= demand([wave], at_s, enough=surer)
