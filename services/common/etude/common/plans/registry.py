"""Registry of the newest rollout plan of each run, and its accuracy."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import NamedTuple

from etude.common.errors import InvalidFieldError, UserError
from etude.common.pinned_images import parse_pinned
from etude.common.plans.forecast import USUAL, Quantile, Wave, peak, start_probability
from etude.v1 import plan_pb2

MAX_WAVES = 1_000
MAX_COUNT = 100_000
MAX_IMAGES = 1_000
MAX_AHEAD_S = 86_400.0
MAX_QUANTILES = 32
MAX_RUNS = 1_000
OVERTAKEN_S = 4.0
"""A plan may overtake another within this time: twice the trainer's deadline for reporting one."""
SOON_S = 60.0
"""About the start time of a host; its warm environments need less."""
NEWEST = 0.3
"""Weight of the newest comparison of observed with forecast environments."""
TRUSTED = (0.5, 2.0)
"""Observed over forecast; outside of this a plan is not acted on."""
ONCE = 3.0
"""One comparison counts as no more than this, or its inverse: two waves out of time are no reason
to distrust a plan, three one after the other are."""


def is_accurate(ratio: float) -> bool:
    """Return true if a ratio of observed to forecast environments is accurate enough."""
    least, most = TRUSTED
    return least <= ratio <= most


class PlannedImage(NamedTuple):
    """An image of tasks that a run will need."""

    template: str
    reference: str
    """With a digest."""


@dataclass(slots=True, kw_only=True)
class RunPlan:
    """One run's forecast, less the environments that were requested."""

    version: int
    received_s: float
    until_s: float
    """End of its validity."""
    waves: list[Wave]
    """Earliest first; those that came have shrunk."""
    forecast: tuple[Wave, ...]
    """The same as they were reported."""
    images: tuple[PlannedImage, ...] = ()
    """Images of the groups that come next, the soonest first."""
    num_arrived: int = 0
    """Environments that the run requested since."""
    num_overdue: int = 0
    """Environments of an earlier wave that may still be requested."""
    is_late: bool = False
    """True if the wave that is due was late before this plan announced it again."""

    def is_newer(self, told: plan_pb2.RolloutPlan, now_s: float) -> bool:
        """Return true if this plan is the reported one, or a newer one.

        Versions are of a clock that may be set back, and of a successor's that may be behind. So
        they say what is newer only of plans that may have overtaken each other.
        """
        may_overtake = now_s - self.received_s < OVERTAKEN_S
        return told.version == self.version or (may_overtake and told.version < self.version)

    def due(self, now_s: float) -> int:
        """Environments of waves that may have started and were not requested yet."""
        return sum(w.count for w in self.waves if _may_have(w, now_s))

    def ratio(self, now_s: float) -> float | None:
        """Ratio of requested to expected environments; None while there is no evidence.

        1 as long as doubt about when waves start explains the difference: plans are replaced at
        the start of a wave, just when half of its probability lies before and half behind.
        """
        if not self.forecast and not self.num_overdue:
            return None
        likely = sum(w.count for w in self.forecast if start_probability(w, now_s) >= USUAL.share)
        least = 0 if self.is_late else likely
        if not self.num_arrived and not least:
            return None
        most = self.num_overdue + sum(w.count for w in self.forecast if _may_have(w, now_s))
        expected = min(max(self.num_arrived, least), most)
        return min(ONCE, max(1 / ONCE, (self.num_arrived + 1) / (expected + 1)))

    def follow(self, before: "RunPlan", *, is_compared: bool, now_s: float) -> None:
        """Take over the environments that were due in the plan before this one."""
        if self.due(now_s) and not before.num_arrived:
            # The same wave, still to come: it is late once, however often that is said.
            self.is_late = before.is_late or is_compared
            self.num_overdue = before.num_overdue
        else:
            # What a run begins it plans on from at once, often before the first launch is here.
            self.num_overdue = before.due(now_s) or max(0, before.num_overdue - before.num_arrived)


def _may_have(wave: Wave, now_s: float) -> bool:
    return start_probability(wave, now_s) >= 1 - USUAL.share


@dataclass(slots=True)
class PlanRegistry:
    """The plans of all runs of a pool."""

    templates: Collection[str]
    pool: str = ""
    """Waves for pools of other names are ignored."""
    _plans: dict[str, RunPlan] = field(default_factory=dict)
    _ratios: dict[str, float] = field(default_factory=dict)
    """Smoothed; of runs with a plan."""

    def report(self, run_id: str, told: plan_pb2.RolloutPlan, *, now_s: float) -> None:
        """Record a run's plan, unless a newer one is known.

        A plan is reported the moment it is made, so its times count from now: clocks may differ.

        Raises:
            InvalidFieldError: naming what is wrong with it.
        """
        if not run_id:
            raise InvalidFieldError("run_id", "is empty")
        valid_s = _valid_s(told)
        waves = list(_waves(told, self.templates, self.pool, now_s=now_s))
        self.forget(now_s=now_s)
        present = self._plans.get(run_id)
        if present is not None and present.is_newer(told, now_s):
            return
        if present is None and len(self._plans) >= MAX_RUNS:
            raise InvalidFieldError("plan", f"{MAX_RUNS} runs have plans already")
        waves.sort(key=lambda wave: wave.start_s)
        plan = RunPlan(
            version=told.version,
            received_s=now_s,
            until_s=now_s + valid_s,
            waves=waves,
            forecast=tuple(waves),
            images=tuple(_images(told, self.templates)),
            # A run tells its first plan as it begins a wave, of about that size, which none told.
            num_overdue=sum(wave.count for wave in waves if wave.start_s == waves[0].start_s),
        )
        self._ratios.setdefault(run_id, 1.0)
        if present is not None:
            newest = present.ratio(now_s)
            if newest is not None:
                # Of logarithms: three times too many are as wrong as a third.
                self._ratios[run_id] *= (newest / self._ratios[run_id]) ** NEWEST
            plan.follow(present, is_compared=newest is not None, now_s=now_s)
        self._plans[run_id] = plan

    def record_arrival(self, run_id: str, template: str, count: int) -> None:
        """Subtract environments that a group of a run requested from its earliest waves."""
        plan = self._plans.get(run_id)
        if plan is None:
            return
        plan.num_arrived += count
        for place, wave in enumerate(plan.waves):
            if wave.template == template and count:
                taken = min(count, wave.count)
                count -= taken
                left = wave.count - taken
                with_image = min(wave.with_image, left)
                plan.waves[place] = replace(wave, count=left, with_image=with_image)
        plan.waves = [wave for wave in plan.waves if wave.count]

    def waves(self, *, now_s: float) -> dict[str, list[Wave]]:
        """Waves that trusted plans still expect, by template."""
        found: dict[str, list[Wave]] = {}
        for run_id, plan in self.current(now_s=now_s).items():
            if self.is_trusted(run_id):
                for wave in plan.waves:
                    found.setdefault(wave.template, []).append(wave)
        return found

    def images(self, *, now_s: float) -> list[PlannedImage]:
        """Images that plans expect, of all runs in turn, each once.

        Also of plans that are not trusted: those are wrong about times, not about tasks.
        """
        plans = self.current(now_s=now_s).values()
        rounds = zip_longest(*(plan.images for plan in plans))
        return list(dict.fromkeys(each for images in rounds for each in images if each))

    def current(self, *, now_s: float) -> Mapping[str, RunPlan]:
        """The newest valid plan of each run, trusted or not."""
        self.forget(now_s=now_s)
        return self._plans

    def peak(self, *, now_s: float) -> int:
        """Peak of concurrent environments that trusted plans expect within the next minute."""
        return sum(
            math.ceil(peak(waves, now_s, SOON_S)) for waves in self.waves(now_s=now_s).values()
        )

    def is_trusted(self, run_id: str) -> bool:
        """Return true if the run's forecasts were accurate enough."""
        return is_accurate(self.ratio(run_id))

    def ratio(self, run_id: str) -> float:
        """Recent ratio of observed to forecast environments; 1 while nothing is known."""
        return self._ratios.get(run_id, 1.0)

    @property
    def worst_ratio(self) -> float:
        """Observed over forecast of the run where it is farthest from 1."""
        return max(self._ratios.values(), key=lambda r: abs(math.log(r)), default=1.0)

    def forget(self, *, now_s: float) -> None:
        """Drop plans that are not valid any more."""
        for run_id in [run_id for run_id, plan in self._plans.items() if plan.until_s <= now_s]:
            del self._plans[run_id], self._ratios[run_id]


def _valid_s(told: plan_pb2.RolloutPlan) -> float:
    """Validity of a plan in seconds.

    Raises:
        InvalidFieldError: not at all.
    """
    valid_s = (told.valid_until_unix_ms - told.made_unix_ms) / 1000
    if valid_s <= 0:
        raise InvalidFieldError("plan.valid_until_unix_ms", "must lie behind made_unix_ms")
    return min(valid_s, MAX_AHEAD_S)


def _waves(
    told: plan_pb2.RolloutPlan, templates: Collection[str], pool: str, *, now_s: float
) -> Iterator[Wave]:
    """The waves for this pool.

    Raises:
        InvalidFieldError: naming what is wrong with one.
    """
    if len(told.waves) > MAX_WAVES:
        raise InvalidFieldError("plan.waves", f"are more than {MAX_WAVES}")
    for place, wave in enumerate(told.waves):
        if wave.pool and pool and wave.pool != pool:
            continue
        where = f"plan.waves[{place}]"
        _check_wave(wave, templates, where)
        yield Wave(
            template=wave.template,
            count=wave.count,
            start_s=now_s + wave.start_s,
            sigma_s=wave.start_sigma_s,
            lease=_quantiles(wave.lease_seconds, where),
            with_image=min(wave.with_image, wave.count),
        )


def _images(told: plan_pb2.RolloutPlan, templates: Collection[str]) -> Iterator[PlannedImage]:
    """The images of this pool's templates; hosts check where each comes from.

    Raises:
        InvalidFieldError: naming what is wrong with one.
    """
    if len(told.images) > MAX_IMAGES:
        raise InvalidFieldError("plan.images", f"are more than {MAX_IMAGES}")
    for place, each in enumerate(told.images):
        try:
            reference = str(parse_pinned(each.image))
        except UserError as cause:
            raise InvalidFieldError(f"plan.images[{place}].image", str(cause)) from cause
        if each.template not in templates:
            raise InvalidFieldError(f"plan.images[{place}].template", "is none of this pool's")
        yield PlannedImage(each.template, reference)


def _check_wave(wave: plan_pb2.Wave, templates: Collection[str], where: str) -> None:
    rules = (
        ("template", wave.template in templates, "is none of this pool's"),
        ("count", wave.count <= MAX_COUNT, f"must be at most {MAX_COUNT}"),
        # A comparison with NaN is false.
        ("start_s", abs(wave.start_s) <= MAX_AHEAD_S, f"must be within {MAX_AHEAD_S:.0f}"),
        ("start_sigma_s", 0 <= wave.start_sigma_s <= MAX_AHEAD_S, "must be a positive number"),
    )
    for name, holds, what in rules:
        if not holds:
            raise InvalidFieldError(f"{where}.{name}", what)


def _quantiles(told: Collection[plan_pb2.LeaseQuantile], where: str) -> tuple[Quantile, ...]:
    found = tuple(Quantile(each.share, each.seconds) for each in told)
    is_sound = len(found) <= MAX_QUANTILES and all(
        0 < each.share < 1 and 0 < each.seconds <= MAX_AHEAD_S for each in found
    )
    grows = all(a.share < b.share and a.seconds <= b.seconds for a, b in pairwise(found))
    if not is_sound or not grows:
        what = f"must be at most {MAX_QUANTILES}, shares in (0, 1) and seconds, both growing"
        raise InvalidFieldError(f"{where}.lease_seconds", what)
    return found
