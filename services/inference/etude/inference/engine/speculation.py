"""Guard of speculative decoding: keeps it on only while engines sample faster with it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from prometheus_client import REGISTRY

from etude.inference import metrics

WINDOW_S = 30.0
"""Length of one measurement. Those of a trial are with, without, without and with, so that load
that rises or falls steadily is in both alike."""
ORDER = (True, False, False, True)
HOLD_S = 1_800.0
"""Time between two trials: heads and load change."""


class SpeedSample(NamedTuple):
    """Measurement of an engine that was busy from end to end."""

    is_on: bool
    tokens: float
    """Sampled tokens."""
    seconds: float
    guessed: float = 0.0
    """Guessed tokens."""
    accepted: float = 0.0
    """Guessed tokens that were sampled."""


class EngineCounts(NamedTuple):
    """Counters of an engine."""

    tokens: float
    """Sampled tokens since the start."""
    running: float
    """Requests in the batch."""
    guessed: float = 0.0
    """Guessed tokens since the start."""
    accepted: float = 0.0
    """Guessed tokens that were sampled, since the start."""


class SpeculativeEngine(Protocol):
    """An engine whose guesses can be turned on and off between two forward passes."""

    async def set_speculation(self, *, is_on: bool) -> None: ...

    def read_counts(self) -> EngineCounts: ...


def speedup(windows: Sequence[SpeedSample]) -> float | None:
    """Rate with guesses over the rate without; None without tokens in both."""
    rates = []
    for is_on in (True, False):
        own = [window for window in windows if window.is_on == is_on]
        tokens, seconds = sum(w.tokens for w in own), sum(w.seconds for w in own)
        if not (tokens and seconds):
            return None
        rates.append(tokens / seconds)
    return rates[0] / rates[1]


def acceptance(windows: Sequence[SpeedSample]) -> float | None:
    """Share of the guessed tokens that were accepted; None without guesses."""
    guessed = sum(window.guessed for window in windows)
    return sum(window.accepted for window in windows) / guessed if guessed else None


def pays(found: float | None) -> bool:
    """True if guesses stay on: they are faster, or nothing was measured."""
    return found is None or found > 1.0


def read_registry() -> EngineCounts:
    """Counts of this process's engine from vLLM's own series."""
    found = dict.fromkeys(
        (
            "vllm:generation_tokens_total",
            "vllm:num_requests_running",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        ),
        0.0,
    )
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return EngineCounts(*found.values())


@dataclass(slots=True, kw_only=True)
class SpeculationGuard:
    """Measures an engine with and without guesses now and then, and leaves the faster way on."""

    engine: SpeculativeEngine
    window_s: float = WINDOW_S
    hold_s: float = HOLD_S
    polls: int = 10
    """Looks at the engine in one window, each of which must find it busy."""

    async def watch(self) -> None:
        """Try for ever; an engine that is idle is tried again later."""
        last: float | None = None
        while True:
            windows = await self.measure()
            found, accepted = speedup(windows), acceptance(windows)
            if accepted is not None:
                metrics.SPECULATION_ACCEPTANCE.set(accepted)
            if found is not None:
                metrics.SPECULATION_SPEEDUP.set(found)
                last = found
            await self._switch(is_on=pays(last))  # an idle engine keeps what was found before
            await asyncio.sleep(self.hold_s if found is not None else self.window_s)

    async def measure(self) -> list[SpeedSample]:
        """Measure one trial; no windows if the engine was idle meanwhile."""
        windows = []
        for is_on in ORDER:
            await self._switch(is_on=is_on)
            window = await self._measure_window(is_on=is_on)
            if window is None:
                return []
            windows.append(window)
        return windows

    async def _measure_window(self, *, is_on: bool) -> SpeedSample | None:
        loop = asyncio.get_running_loop()
        started, first = loop.time(), self.engine.read_counts()
        last = first
        for _ in range(self.polls):
            if not last.running:
                return None
            await asyncio.sleep(self.window_s / self.polls)
            last = self.engine.read_counts()
        return SpeedSample(
            is_on,
            last.tokens - first.tokens,
            loop.time() - started,
            last.guessed - first.guessed,
            last.accepted - first.accepted,
        )

    async def _switch(self, *, is_on: bool) -> None:
        await self.engine.set_speculation(is_on=is_on)
        metrics.SPECULATION_ON.set(is_on)
