"""When waves will come, from when they came."""

from random import Random

import pytest

from etude.trainer.controller.admission.forecast import LEAST_LEASES, WaveForecast
from etude.v1 import journal_pb2, rollout_pb2

NOW_MS = 1_000_000


def records(*seconds: float, ending: rollout_pb2.Ending) -> list[journal_pb2.JournalRollout]:
    return [
        journal_pb2.JournalRollout(
            rollout=rollout_pb2.Rollout(
                ending=ending, costs=rollout_pb2.Costs(token_seconds=s / 2, tool_seconds=s / 2)
            )
        )
        for s in seconds
    ]


def after(*starts_s: float) -> WaveForecast:
    forecast = WaveForecast()
    for each in starts_s:
        forecast.record_wave(each)
    return forecast


def test_there_is_no_plan_before_there_is_a_rhythm() -> None:
    assert not after(0.0, 100.0).plan([{"repos": 8}], now_s=100.0, now_unix_ms=NOW_MS).waves
    assert not after(0.0, 100.0, 200.0).plan([], now_s=200.0, now_unix_ms=NOW_MS).waves


def test_waves_follow_at_the_usual_distance_with_growing_doubt() -> None:
    forecast = after(0.0, 100.0, 200.0, 300.0)

    plan = forecast.plan([{"repos": 8}, {"repos": 4, "web": 4}], now_s=310.0, now_unix_ms=NOW_MS)

    assert plan is not None
    assert [(w.pool, w.count, w.start_s) for w in plan.waves] == [
        ("repos", 8, 90.0),
        ("repos", 4, 190.0),
        ("web", 4, 190.0),
    ]
    first, second, _ = (wave.start_sigma_s for wave in plan.waves)
    assert second == pytest.approx(first * 2**0.5)
    assert plan.valid_until_unix_ms == NOW_MS + 300_000


def test_a_long_evaluation_between_two_waves_changes_the_rhythm_little() -> None:
    forecast = after(0.0, 100.0, 200.0, 1_200.0, 1_300.0, 1_400.0)

    assert forecast.gap is not None
    assert forecast.gap.seconds == 100.0


def test_most_waves_come_within_two_deviations_of_their_forecast() -> None:
    random, now_s, forecast, hits = Random(3), 0.0, WaveForecast(), 0
    for step in range(300):
        forecast.record_wave(now_s)
        gap = forecast.gap
        now_s += random.gauss(100, 10)
        if gap is not None and step > 30:
            hits += abs(now_s - forecast._starts_s[-1] - gap.seconds) <= 2 * gap.sigma_s

    # 95 of 100 for a normal distribution; the spread of 20 waves is itself uncertain.
    assert hits / 269 > 0.88


def test_environments_are_kept_as_long_as_rollouts_took_and_faults_say_nothing() -> None:
    forecast = after(0.0, 100.0, 200.0)
    done = rollout_pb2.ENDING_STOPPED
    forecast.record_leases("repos", records(*map(float, range(1, 101)), ending=done))
    fault = rollout_pb2.ENDING_PLATFORM_FAULT
    forecast.record_leases("repos", records(*[9_999.0] * 50, ending=fault))
    forecast.record_leases("web", records(*[5.0] * (LEAST_LEASES - 1), ending=done))

    plan = forecast.plan([{"repos": 1, "web": 1}], now_s=200.0, now_unix_ms=NOW_MS)

    assert plan is not None
    repos, web = plan.waves
    assert [(q.share, q.seconds) for q in repos.lease_seconds] == [
        (0.5, 51.0),
        (0.9, 91.0),
        (0.99, 100.0),
    ]
    assert not web.lease_seconds


def trained_for(rest_s: float) -> WaveForecast:
    """Waves every 100 s, each after a step that took as long as given."""
    forecast = WaveForecast()
    for start_s in (0.0, 100.0, 200.0, 300.0):
        forecast.record_step(start_s - rest_s)
        forecast.record_wave(start_s)
    return forecast


def first(forecast: WaveForecast, now_s: float) -> list[float]:
    plan = forecast.plan([{"repos": 8}], now_s=now_s, now_unix_ms=NOW_MS)
    assert plan is not None
    return [plan.waves[0].start_s, plan.waves[0].start_sigma_s]


def test_a_step_that_begins_says_when_the_next_wave_comes() -> None:
    forecast = trained_for(30.0)
    forecast.record_step(350.0)

    # 20 s early, and a twentieth of the rest is the least doubt.
    assert first(forecast, 350.0) == pytest.approx([30.0, 1.5])
    assert first(forecast, 400.0)[0] == 0.0, "what is overdue may come at any moment"


def test_a_wave_is_not_expected_before_a_step_that_has_not_begun_could_be_over() -> None:
    forecast = trained_for(30.0)

    assert first(forecast, 320.0) == pytest.approx([80.0, 5.0])
    assert first(forecast, 450.0) == pytest.approx([30.0, 1.5])
