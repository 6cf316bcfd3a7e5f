"""Autoscaling of a pool: its number of hosts follows demand."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import Fraction, Model, Rule

CRON = r"^[^\s]+( [^\s]+){4}$"
TIME_ZONE = r"^[A-Za-z][A-Za-z0-9_+/-]*$"

Percent = Annotated[int, Field(ge=1, le=100)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]


class ScalingMode(StrEnum):
    """Source of a pool's number of hosts."""

    MANUAL = "Manual"
    REACTIVE = "Reactive"
    PREDICTIVE = "Predictive"
    EXTERNAL = "External"


DECIDED = (ScalingMode.REACTIVE, ScalingMode.PREDICTIVE)
"""Modes in which the operator decides, and spec.replicas is unused."""


class ZeroMode(StrEnum):
    """Permission to have no host at all."""

    NEVER = "Never"
    WHEN_IDLE = "WhenIdle"


class ScaleToZero(Model):
    """Scaling of an idle pool to no host at all."""

    mode: ZeroMode = ZeroMode.NEVER
    """WhenIdle: after a whole stable window without demand, and graceSeconds. The brokers stay, so
    the first request is heard."""
    grace_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """Beside the stable window; so long a plan counts, too, whose run has fallen silent, unless the
    plan is over before."""


class ScheduleEntry(Model):
    """From each moment of a cron expression on, until the next of any entry."""

    cron: Annotated[str, Field(max_length=128, pattern=CRON)]
    """Five fields with one blank between them, such as `0 8 * * 1-5`."""
    time_zone: Annotated[str, Field(max_length=64, pattern=TIME_ZONE)] = "UTC"
    """As in the IANA database, such as `Europe/Berlin`."""
    min_idle: Annotated[int, Field(ge=0, le=1_000_000)]
    """Slots that there are at least from then on, leased ones included, as far as maxReplicas have
    them; spec.minIdle is beside those that are leased."""


class AutoscalingCosts(Model):
    """Prices of waiting and of keeping, in one currency of your own."""

    gpu_second: Fraction
    """Of one GPU."""
    sandbox_second: Fraction
    """Of one slot."""


class PredictiveScaling(Model):
    """Use of the runs' plans."""

    service_level_percent: Annotated[int, Field(ge=50, le=99)] = 80
    """In how many cases of a hundred what is ready shall be enough."""
    costs: AutoscalingCosts | None = None
    """Where they are known the service level follows from them and from the GPUs of the run that
    plans, and serviceLevelPercent is for runs without GPUs."""
    max_horizon_seconds: Seconds = 1_800
    """Farther ahead nothing of a plan is looked at."""
    plan_stale_seconds: Seconds = 120
    """So long after its run was last heard a plan still counts, and scaleToZero.graceSeconds on;
    never for longer than it holds itself: three times the usual time between its run's waves, a
    minute at least."""


class Refill(Model):
    """Limits on the creation of hosts."""

    max_per_second: Annotated[int, Field(ge=1, le=1_000)] = 50
    """Hosts that one second may bring."""
    max_in_flight: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Hosts that are not ready yet at any time."""


class Autoscaling(Model):
    """Autoscaling of the number of hosts by demand."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.mode in ['Reactive', 'Predictive'] || !(has(self.targetUtilizationPercent)"
            " || has(self.stableWindowSeconds) || has(self.panicWindowPercent)"
            " || has(self.panicThresholdPercent) || has(self.maxScaleUpRate)"
            " || has(self.maxScaleDownRate) || has(self.scaleDownDelaySeconds)"
            " || has(self.burstCapacity) || has(self.scaleToZero)"
            " || (has(self.schedule) && size(self.schedule) > 0)"
            " || has(self.refill))",
            holds=lambda s: s.mode in DECIDED or s.is_bare,
            message="in modes Manual and External the operator does not decide, and nothing reads"
            " targetUtilizationPercent, stableWindowSeconds, panicWindowPercent,"
            " panicThresholdPercent, maxScaleUpRate, maxScaleDownRate, scaleDownDelaySeconds,"
            " burstCapacity, scaleToZero, schedule and refill",
            fix="remove the other fields, or take mode: Reactive",
            field_path=".mode",
        ),
        Rule(
            cel="self.mode == 'Predictive' || !has(self.predictive)",
            holds=lambda s: s.mode is ScalingMode.PREDICTIVE or s.predictive is None,
            message="predictive is about plans, which only mode Predictive reads",
            fix="remove predictive, or take mode: Predictive",
            field_path=".predictive",
        ),
        Rule(
            cel="(has(self.panicWindowPercent) ? self.panicWindowPercent : 10)"
            " * (has(self.stableWindowSeconds) ? self.stableWindowSeconds : 60) >= 100",
            holds=lambda s: (s.panic_window_percent or 10) * (s.stable_window_seconds or 60) >= 100,
            message="panicWindowPercent of stableWindowSeconds must be at least one second",
            fix="raise stableWindowSeconds or panicWindowPercent",
            field_path=".panicWindowPercent",
        ),
    )

    mode: ScalingMode = ScalingMode.PREDICTIVE
    """Manual: spec.replicas, which people and Kubernetes' own autoscaler set through the scale
    subresource. External: the same, set by KEDA. Reactive: demand of late. Predictive: that, and
    the plans of runs."""
    target_utilization_percent: Percent | None = None
    """Slots that demand of late may fill: 80 unless set, and 100 while mode Predictive has a plan
    to go by of every run that holds environments."""
    stable_window_seconds: Annotated[int, Field(ge=10, le=3_600)] | None = None
    """Demand is averaged over this: 60 unless set, and 30 while mode Predictive has a plan."""
    panic_window_percent: Percent | None = None
    """Share of the stable window that is looked at for bursts, of at least one second: 10 unless
    set."""
    panic_threshold_percent: Annotated[int, Field(ge=110, le=1_000)] | None = None
    """Demand in that short window over what is ready, from which on the pool panics, and shrinks no
    more for a stable window: 200 unless set."""
    max_scale_up_rate: Annotated[int, Field(ge=2, le=10_000)] | None = None
    """A pool grows at most so many times at once by demand of late: 10 unless set, and 1000 with
    Predictive."""
    max_scale_down_rate: Annotated[int, Field(ge=2, le=1_000)] | None = None
    """One over the share of a pool that is kept in any case as it shrinks: 2 unless set."""
    scale_down_delay_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """A pool shrinks to the most that was wanted for so long: 120 unless set; with Predictive 30,
    and 15 while it has a plan."""
    burst_capacity: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Slots that a burst may ask for at once: condition BurstCapacityMet says whether they would be
    there. 0 unless set."""
    scale_to_zero: ScaleToZero | None = None
    """A pool keeps one host at least unless this says otherwise."""
    schedule: Annotated[tuple[ScheduleEntry, ...], Field(max_length=16)] = ()
    """Slots to have from times of day on."""
    predictive: PredictiveScaling | None = None
    """Use of the runs' plans."""
    refill: Refill | None = None
    """Limits on the creation of hosts."""

    @property
    def is_bare(self) -> bool:
        """True if no field says how demand is followed."""
        said = frozenset(type(self).model_fields) - {"mode", "predictive"}
        return all(getattr(self, name) in (None, ()) for name in said)
