"""Forecast of a phase's demand for environments, from the rhythm of its waves and leases."""

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from etude.v1 import journal_pb2, plan_pb2, rollout_pb2

KEPT_WAVES, KEPT_LEASES = 20, 400
SHARES = (0.5, 0.9, 0.99)
LEAST_LEASES = 8
"""Fewest leases from which their durations are reported."""
MAD_TO_SIGMA = 1.4826
"""For a normal distribution. Evaluations and checkpoints make a few gaps much longer than most."""
LEAST_DOUBT = 0.05
"""Least standard deviation, as a share of the gap: few gaps say little about their spread."""
LIKELY = 1.645
"""Standard deviations below the mean that 5 of 100 cases exceed."""
VALID_GAPS, LEAST_VALID_S = 3.0, 60.0
"""Validity of a plan, in gaps and in seconds."""


class Gap(NamedTuple):
    """Typical time from an event to the next wave of groups."""

    seconds: float
    sigma_s: float


@dataclass(slots=True)
class WaveForecast:
    """Forecast of one phase's next waves."""

    _starts_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WAVES))
    _held_s: dict[str, deque[float]] = field(default_factory=dict)
    """By environment."""
    _steps_s: list[float] = field(default_factory=list)
    """Start of each training step since the newest wave."""
    _rests_s: dict[int, deque[float]] = field(default_factory=dict)
    """Times from the first, second, ... step to the wave that followed."""

    def record_wave(self, now_s: float) -> None:
        for number, began_s in enumerate(self._steps_s):
            rests_s = self._rests_s.setdefault(number, deque(maxlen=KEPT_WAVES))
            rests_s.append(now_s - began_s)
        self._steps_s.clear()
        self._starts_s.append(now_s)

    def record_step(self, now_s: float) -> None:
        """Record the start of a step, from which the time to the next wave varies less."""
        self._steps_s.append(now_s)

    def record_leases(
        self, environment: str, records: Iterable[journal_pb2.JournalRollout]
    ) -> None:
        """Record the lease times of finished rollouts."""
        held_s = self._held_s.setdefault(environment, deque(maxlen=KEPT_LEASES))
        for record in records:
            costs = record.rollout.costs
            seconds = costs.token_seconds + costs.tool_seconds
            is_ours = record.rollout.ending != rollout_pb2.ENDING_PLATFORM_FAULT
            if is_ours and math.isfinite(seconds) and seconds > 0:
                held_s.append(seconds)

    @property
    def gap(self) -> Gap | None:
        """Typical time between two waves; None before there were three."""
        return _typical_gap([after - before for before, after in pairwise(self._starts_s)])

    def _next_wave(self, gap: Gap, now_s: float) -> Gap:
        """Time until the next wave starts, with its standard deviation."""
        begun = len(self._steps_s)
        rest = _typical_gap(self._rests_s.get(max(0, begun - 1), ()))
        since_s = now_s - (self._steps_s[-1] if begun else self._starts_s[-1])
        # An overdue wave may start at any moment.
        if rest is None:
            return Gap(max(0.0, self._starts_s[-1] + gap.seconds - now_s), gap.sigma_s)
        if begun:
            return Gap(max(0.0, rest.seconds - since_s), rest.sigma_s)
        # A step precedes the wave and has not started: the wave cannot start before its end.
        start_s = max(gap.seconds - since_s, rest.seconds)
        doubt_s = (start_s - rest.seconds) / LIKELY + rest.sigma_s
        return Gap(start_s, min(gap.sigma_s, doubt_s))

    def plan(
        self, waves: Sequence[Mapping[str, int]], *, now_s: float, now_unix_ms: int
    ) -> plan_pb2.RolloutPlan:
        """Build the plan of the next waves; it has none while there is no rhythm yet.

        Args:
            waves: environments by name, of the wave after the newest one and those behind it.
            now_s: on the clock of the recorded waves.
            now_unix_ms: the same moment.
        """
        gap = self.gap
        valid_s = LEAST_VALID_S if gap is None else max(LEAST_VALID_S, VALID_GAPS * gap.seconds)
        found = plan_pb2.RolloutPlan(
            # Of the clock, so that a successor's plans are newer than ours.
            version=now_unix_ms,
            made_unix_ms=now_unix_ms,
            valid_until_unix_ms=now_unix_ms + round(1000 * valid_s),
        )
        if gap is None:
            return found
        first = self._next_wave(gap, now_s)
        for number, wave in enumerate(waves):
            for environment, count in wave.items():
                found.waves.add(
                    pool=environment,
                    count=count,
                    start_s=first.seconds + number * gap.seconds,
                    start_sigma_s=math.hypot(first.sigma_s, math.sqrt(number) * gap.sigma_s),
                    lease_seconds=self._quantiles(environment),
                )
        return found

    def _quantiles(self, environment: str) -> list[plan_pb2.LeaseQuantile]:
        held_s = sorted(self._held_s.get(environment, ()))
        if len(held_s) < LEAST_LEASES:
            return []
        return [
            plan_pb2.LeaseQuantile(
                share=share, seconds=held_s[min(len(held_s) - 1, int(share * len(held_s)))]
            )
            for share in SHARES
        ]


def _typical_gap(gaps_s: Collection[float]) -> Gap | None:
    """Median and spread of gaps; None for fewer than two."""
    if len(gaps_s) < 2:
        return None
    middle = statistics.median(gaps_s)
    spread = MAD_TO_SIGMA * statistics.median(abs(each - middle) for each in gaps_s)
    return Gap(middle, max(spread, LEAST_DOUBT * middle))
