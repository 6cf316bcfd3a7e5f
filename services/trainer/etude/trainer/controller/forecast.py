"""When a phase will ask for environments next, from when it did and for how long it kept them."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from etude.v1 import journal_pb2, plan_pb2, rollout_pb2

KEPT_WAVES, KEPT_LEASES = 20, 400
SHARES = (0.5, 0.9, 0.99)
LEAST_LEASES = 8
"""Before so many, how long environments are kept is not told."""
MAD_TO_SIGMA = 1.4826
"""For a normal distribution. Evaluations and checkpoints make a few gaps much longer than most."""
LEAST_DOUBT = 0.05
"""Share of a gap that is its standard deviation at least: few gaps say little of their spread."""
VALID_GAPS, LEAST_VALID_S = 3.0, 60.0
"""How long a plan holds when no other comes."""


class Gap(NamedTuple):
    """Time from one wave of groups to the next."""

    seconds: float
    sigma_s: float


@dataclass(slots=True)
class Forecast:
    """What one phase's rhythm says of its next waves."""

    _starts_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WAVES))
    _held_s: dict[str, deque[float]] = field(default_factory=dict)
    """By environment."""

    def started(self, now_s: float) -> None:
        """A wave of groups was launched."""
        self._starts_s.append(now_s)

    def ended(self, environment: str, records: Iterable[journal_pb2.JournalRollout]) -> None:
        """Rollouts gave their environments back."""
        held_s = self._held_s.setdefault(environment, deque(maxlen=KEPT_LEASES))
        for record in records:
            costs = record.rollout.costs
            seconds = costs.token_seconds + costs.tool_seconds
            is_ours = record.rollout.ending != rollout_pb2.ENDING_PLATFORM_FAULT
            if is_ours and math.isfinite(seconds) and seconds > 0:
                held_s.append(seconds)

    @property
    def gap(self) -> Gap | None:
        """The usual time between two waves; None before there were three."""
        gaps = [after - before for before, after in pairwise(self._starts_s)]
        if len(gaps) < 2:
            return None
        middle = statistics.median(gaps)
        spread = MAD_TO_SIGMA * statistics.median(abs(each - middle) for each in gaps)
        return Gap(middle, max(spread, LEAST_DOUBT * middle))

    def plan(
        self, waves: Sequence[Mapping[str, int]], *, now_s: float, now_unix_ms: int
    ) -> plan_pb2.RolloutPlan | None:
        """The plan of the next waves; None while there is no rhythm to go by.

        Args:
            waves: environments by name, of the wave after the newest one and those behind it.
            now_s: on the clock of started().
            now_unix_ms: the same moment.
        """
        gap = self.gap
        if gap is None or not any(waves):
            return None
        valid_s = max(LEAST_VALID_S, VALID_GAPS * gap.seconds)
        found = plan_pb2.RolloutPlan(
            # Of the clock, so that a successor's plans are newer than ours.
            version=now_unix_ms,
            made_unix_ms=now_unix_ms,
            valid_until_unix_ms=now_unix_ms + round(1000 * valid_s),
        )
        for number, wave in enumerate(waves, 1):
            for environment, count in wave.items():
                found.waves.add(
                    pool=environment,
                    count=count,
                    start_s=self._starts_s[-1] + number * gap.seconds - now_s,
                    start_sigma_s=math.sqrt(number) * gap.sigma_s,
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
