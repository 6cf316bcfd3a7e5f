"""The simulation that modes are compared in counts what it says it counts."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[5] / "bench"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("autoscaler_bench.simulation")


@pytest.fixture
def traces(simulated: Any) -> Any:
    return {t.name: t for t in importlib.import_module("autoscaler_bench.traces").traces(3, 0)}


@pytest.mark.parametrize("mode", ["fixed", "hpa", "kpa", "kpa_plan", "oracle"])
def test_every_environment_is_served_once_and_costs_at_least_its_lease(
    simulated: Any, traces: Any, mode: str
) -> None:
    trace = traces["failures"]
    found = simulated.Simulation(trace, simulated.Mode(mode)).outcome()

    asks = [ask for wave in trace.waves for ask in wave]
    assert len(found.waits_s) == len(asks)
    assert min(found.waits_s) >= 0
    assert found.sandbox_s >= sum(ask.held_s for ask in asks)


def test_with_enough_replicas_all_the_time_nothing_waits(simulated: Any, traces: Any) -> None:
    found = simulated.Simulation(traces["lognormal"], simulated.Mode.FIXED).outcome()

    assert (found.idle_s, max(found.waits_s), found.over_created) == (0.0, 0.0, 0)


def test_gpus_of_a_synchronous_run_wait_until_the_last_environment_is_there(
    simulated: Any, traces: Any
) -> None:
    trace = traces["pareto"]
    found = simulated.Simulation(trace, simulated.Mode.KPA).outcome()

    # Waits are told in the order in which they end, wave by wave.
    size = len(trace.waves[0])
    longest = [max(found.waits_s[at : at + size]) for at in range(0, len(found.waits_s), size)]
    assert found.idle_s == pytest.approx(trace.gpus * sum(longest))


def test_the_same_seed_is_the_same_run(simulated: Any, traces: Any) -> None:
    once, again = (
        simulated.Simulation(traces["asynchronous"], simulated.Mode.PLAN).outcome()
        for _ in range(2)
    )

    assert (once.idle_s, once.sandbox_s, once.waits_s) == (
        again.idle_s,
        again.sandbox_s,
        again.waits_s,
    )
