"""Reactive scaling by observed demand: Knative's pod autoscaler (KPA), stable and panic mode.

Formulas: https://github.com/knative/serving, pkg/autoscaler/scaling/autoscaler.go.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from etude.operator.pools.autoscaling.config import ScalingParameters
from etude.operator.pools.autoscaling.windows import Samples, average


class PanicState(NamedTuple):
    """Panic mode: demand outgrew the pool recently, and nothing shrinks until it ends."""

    over_s: float
    """Time at which demand was last too large."""
    most: int
    """The most replicas that were desired since it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactiveSize:
    """Replicas by the stable and the panic window."""

    wanted: int
    """Replicas for demand, within the scale-up rate; in panic mode the most so far."""
    least: int
    """Replicas that the pool keeps, by the scale-down rate."""
    stable: float
    """Mean demand in slots over the stable window."""
    panicked: float
    """Mean demand in slots over the panic window."""
    panic: PanicState | None

    @property
    def replicas(self) -> int:
        """Replicas by the windows alone, without the scale-down delay."""
        return max(self.wanted, self.least)


def reactive_size(
    samples: Samples,
    panic: PanicState | None,
    config: ScalingParameters,
    *,
    ready: int,
    slots: int,
    now_s: float,
) -> ReactiveSize | None:
    """The size by recent demand; None without samples.

    Args:
        samples: of demand in slots: leased and queued.
        panic: of the last decision.
        config: of the pool.
        ready: replicas that take leases.
        slots: of a replica.
        now_s: on the clock of the samples.
    """
    stable = average(samples, config.stable_window_s, now_s=now_s)
    panicked = average(samples, config.panic_window_s, now_s=now_s)
    if stable is None or panicked is None:
        return None
    target = slots * config.target_utilization_percent / 100
    reachable = max(1, ready)
    most = math.ceil(config.max_scale_up_rate * reachable)
    least = math.floor(reachable / config.max_scale_down_rate) if ready else 0
    calm, rushed = math.ceil(stable / target), math.ceil(panicked / target)
    if rushed / reachable >= config.panic_threshold_percent / 100:
        panic = PanicState(now_s, panic.most if panic else 0)
    elif panic is not None and now_s > panic.over_s + config.stable_window_s:
        panic = None
    if panic is not None:
        panic = panic._replace(most=max(panic.most, least, min(max(calm, rushed), most)))
    return ReactiveSize(
        wanted=panic.most if panic else min(calm, most),
        least=min(least, most),
        stable=stable,
        panicked=panicked,
        panic=panic,
    )


def excess_burst_capacity(panicked: float, *, ready: int, slots: int, burst: int) -> int:
    """Free slots after a burst; negative if part of it would have to wait."""
    return math.floor(ready * slots - burst - panicked)
