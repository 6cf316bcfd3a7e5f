"""An autoscaler that knows when waves really start and how long leases really last."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from typing_extensions import override

from autoscaler_bench.events import Clock
from autoscaler_bench.pool import Pool, Waiting
from autoscaler_bench.run import Run
from autoscaler_bench.scalers import Order, Scaler, order
from autoscaler_bench.traces import Trace
from etude.common.api.pool.autoscaling import Refill
from etude.operator.pools.autoscaling.config import TICK_S

REFILL = Refill()
SLOWEST = 2.5
"""Its replicas take no longer than so many times the median: it knows which would."""


class Need(NamedTuple):
    """What a trace asks for when nothing is ever waited for."""

    waves: list[tuple[float, int]]
    """When waves start, and how many environments are held then, those that end later included."""
    most: int
    """The most that is ever held."""


def need(trace: Trace) -> Need:
    """What a trace does to a pool without end."""
    clock = Clock()
    leases: list[tuple[float, float]] = []

    class Endless(Pool):
        @override
        def ask(self, waiting: Waiting) -> None:
            leases.append((clock.now_s, clock.now_s + waiting.ask.held_s))
            waiting.granted()
            clock.after(waiting.ask.held_s, waiting.ended)

    run = Run(clock, Endless(clock, trace), trace)
    run.start()
    clock.run(lambda: run.is_over)
    waves = [
        (at_s, sum(began_s <= at_s < ended_s for began_s, ended_s in leases))
        for at_s in run.launches
    ]
    return Need(waves, max(count for _, count in waves))


def known(trace: Trace) -> Trace:
    """The trace without replicas that somebody who knows them would not have created."""
    provisioning = replace(trace.provisioning, failing=0.0, slow=0.0, slowest=SLOWEST)
    return replace(trace, provisioning=provisioning)


@dataclass(slots=True)
class Oracle(Scaler):
    """Creates replicas just in time, and gives up at once what is not needed so soon again."""

    clock: Clock
    pool: Pool
    run: Run
    need: Need

    @override
    def decide(self) -> Order:
        provisioning, slots = self.pool.trace.provisioning, self.pool.trace.slots
        slow_s = SLOWEST * provisioning.median_s
        rate = slots * min(
            REFILL.max_per_second, REFILL.max_in_flight / max(TICK_S, provisioning.median_s)
        )
        # Each wait so far has moved what is still to come.
        from_s = self.clock.now_s - self._late_s()
        wanted = self.pool.demand
        for at_s, count in self.need.waves[len(self.run.launches) :]:
            if at_s - from_s <= slow_s + max(0, count - self.pool.leased) / rate + TICK_S:
                wanted = max(wanted, count)
            elif at_s - from_s > slow_s + self.need.most / rate + TICK_S:
                break
        return order(self.pool, -(-wanted // slots))

    def _late_s(self) -> float:
        begun = len(self.run.launches)
        return self.run.launches[-1] - self.need.waves[begun - 1][0] if begun else 0.0
