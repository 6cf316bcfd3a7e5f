"""The plans of a simulated run, made by the trainer's own forecast and kept by the broker's book.

They know what a real one knows: how often waves came, how long environments were kept, and how many
of which template the next waves have. When a wave really starts is nothing that they see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoscaler_bench.events import Clock
from autoscaler_bench.traces import Ask, Trace
from etude.common.plans.registry import PlanRegistry
from etude.operator.pools.autoscaling.values import DemandPlan
from etude.trainer.controller.admission.forecast import WaveForecast
from etude.v1 import journal_pb2

RUN = "run"


@dataclass(slots=True)
class Planner:
    """One run's forecast, and what its pool has heard of it."""

    clock: Clock
    trace: Trace
    forecast: WaveForecast = field(default_factory=WaveForecast)
    book: PlanRegistry = field(init=False)
    _following: Sequence[Mapping[str, int]] = ()

    def __post_init__(self) -> None:
        self.book = PlanRegistry({ask.template for wave in self.trace.waves for ask in wave})

    def launched(self, wave: Mapping[str, int], following: Sequence[Mapping[str, int]]) -> None:
        """A wave came; those that follow are forecast anew."""
        now_s = self.clock.now_s
        for template, count in wave.items():
            self.book.record_arrival(RUN, template, count)
        self.forecast.record_wave(now_s)
        self._following = following
        self._report()

    def repeat(self) -> None:
        """Say it again, as it looks now."""
        if self._following:
            self._report()

    def stepped(self) -> None:
        """A step began to train, which says more of the next wave."""
        self.forecast.record_step(self.clock.now_s)
        self._report()

    def _report(self) -> None:
        now_s = self.clock.now_s
        told = self.forecast.plan(self._following, now_s=now_s, now_unix_ms=self._unix_ms)
        if told.waves:
            for each in told.waves:
                each.pool, each.template = "", each.pool
            self.book.report(RUN, told, now_s=now_s)

    def ended(self, ask: Ask) -> None:
        """A rollout gave its environment back."""
        record = journal_pb2.JournalRollout()
        record.rollout.costs.tool_seconds = ask.held_s
        self.forecast.record_leases(ask.template, [record])

    def plans(self) -> tuple[DemandPlan, ...]:
        """As the autoscaler is told. The run's controller is always heard."""
        now_s = self.clock.now_s
        return tuple(
            DemandPlan(
                run_id=run_id,
                version=plan.version,
                heard_s=now_s,
                until_s=plan.until_s,
                waves=tuple(plan.waves),
                ratio=self.book.ratio(run_id),
                gpus=self.trace.gpus,
            )
            for run_id, plan in self.book.current(now_s=now_s).items()
        )

    @property
    def _unix_ms(self) -> int:
        return round(1000 * self.clock.now_s) + 1
