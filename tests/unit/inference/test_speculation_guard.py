"""The guard that turns speculative decoding off where it does not pay."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from etude.inference.engine.speculation import (
    EngineCounts,
    SpeculationGuard,
    SpeculativeEngine,
    SpeedSample,
    acceptance,
    pays,
    speedup,
)


def guard_of(engine: "Engine") -> SpeculationGuard:
    return SpeculationGuard(engine=engine, window_s=0.02, hold_s=60.0, polls=2)


@dataclass
class Engine(SpeculativeEngine):
    """Samples at a rate of its own with guesses, and at another without."""

    with_guesses: float
    without: float
    running: float = 8.0
    is_on: bool = True
    tokens: float = 0.0
    guessed: float = 0.0
    accepted: float = 0.0
    switches: list[bool] = field(default_factory=list)

    @override
    async def set_speculation(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.switches.append(is_on)

    @override
    def read_counts(self) -> EngineCounts:
        self.tokens += self.with_guesses if self.is_on else self.without
        if self.is_on:
            self.guessed += 50
            self.accepted += 30
        return EngineCounts(self.tokens, self.running, self.guessed, self.accepted)


async def settle(engine: Engine) -> None:
    """Let the guard finish its first trial."""
    task = asyncio.create_task(guard_of(engine).watch(), name="guard")
    async with asyncio.timeout(30):
        while len(engine.switches) < 5:  # noqa: ASYNC110 - the guard has no event
            await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("with_guesses", "stays_on"), [(1_000.0, True), (10.0, False)])
async def test_the_faster_way_stays_on(with_guesses: float, stays_on: bool) -> None:  # noqa: FBT001 - a parameter
    engine = Engine(with_guesses, without=100.0)
    await settle(engine)
    assert engine.switches == [True, False, False, True, stays_on]
    assert REGISTRY.get_sample_value("etude_speculation_acceptance") == pytest.approx(0.6)


async def test_an_idle_engine_keeps_its_guesses_and_is_tried_again() -> None:
    engine = Engine(10.0, without=100.0, running=0.0)
    assert await guard_of(engine).measure() == []
    assert pays(speedup([]))
    await settle(engine)
    assert all(engine.switches)


def test_the_speedup_is_of_rates_over_all_windows() -> None:
    fast, slow = (
        SpeedSample(is_on=True, tokens=300, seconds=2.0),
        SpeedSample(is_on=False, tokens=100, seconds=1),
    )
    windows = [fast, slow, fast]
    assert speedup(windows) == pytest.approx(1.5)
    assert speedup(windows[:1]) is None
    assert not pays(1.0)


def test_acceptance_is_of_windows_with_guesses() -> None:
    on = SpeedSample(is_on=True, tokens=300, seconds=2.0, guessed=40, accepted=10)
    off = SpeedSample(is_on=False, tokens=100, seconds=1)
    assert acceptance([on, off, on]) == 0.25
    assert acceptance([off]) is None
