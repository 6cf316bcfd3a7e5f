"""Rollout plans: reports of a run's forecast demand to the brokers of its environments."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import grpc

from etude.common.rpc.broker_channel import dial_brokers
from etude.trainer.controller.admission.forecast import WaveForecast
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.task_images import TaskImageReader
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.rollouts.tasks import Task
from etude.v1 import environments_pb2, environments_pb2_grpc, plan_pb2

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""A broker that needs longer gets the next plan instead."""
REPEAT_S = 5.0
"""Brokers forget a plan that is not repeated, and the time to a wave changes."""
WAVES = 3
"""Waves in a plan: uncertainty grows with each."""


@dataclass(slots=True)
class PlanReporter:
    """Reports plans to brokers in the background.

    Without brokers or their answers environments are only ready later.
    """

    run_id: str = ""
    brokers: Mapping[str, str] = field(default_factory=dict)
    """By environment."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """By environment."""
    forecast: WaveForecast = field(default_factory=WaveForecast)
    images: TaskImageReader = field(default_factory=TaskImageReader)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    _reports: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """Reports under way, by the broker's address."""
    _unheard: set[str] = field(default_factory=set)
    """Addresses of brokers that did not accept the last plan."""
    _ready_ms: dict[str, int] = field(default_factory=dict)
    """By environment: time of its broker's next free slot, in Unix milliseconds; 0 for now."""
    _following: Sequence[Mapping[str, int]] = ()
    """Environments by name, of each wave behind the newest one."""
    _next_tasks: Sequence[Sequence[Task]] = ()
    """Tasks of those waves."""
    _siblings: int = 1
    _reading: "asyncio.Task[None] | None" = None
    _repeating: "asyncio.Task[None] | None" = None

    def begin_phase(self) -> None:
        """Reset the forecast: each phase has its own rhythm."""
        self.forecast = WaveForecast()
        self._following, self._next_tasks = (), ()

    def report_wave(self, following: Sequence[Sequence[Task]], *, siblings: int) -> None:
        """Record the launch of a wave, and report the waves that follow."""
        self.forecast.record_wave(time.monotonic())
        self._following = [
            {
                name: siblings * count
                for name, count in Counter(task.environment for task in tasks).items()
            }
            for tasks in following
        ]
        self._next_tasks, self._siblings = following, siblings
        self._send_plans()
        if self.brokers and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_images(), name="read-images-of-tasks")
        if self._repeating is None and self.brokers:
            self._repeating = asyncio.create_task(self._repeat(), name="repeat-plans")

    def ready_ms(self, environment: str) -> int:
        """Time of the next free slot of an environment's broker; 0 for now or unknown."""
        at_ms = self._ready_ms.get(environment, 0)
        return at_ms if at_ms > 1000 * time.time() else 0

    def report_step(self) -> None:
        """Record the start of a step, and report the sharper forecast."""
        self.forecast.record_step(time.monotonic())
        self._send_plans()

    async def _read_images(self) -> None:
        """Read the images of the next tasks, and report them with the plan."""
        while await self.images.read(list(chain.from_iterable(self._next_tasks))):
            self._send_plans()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            self._send_plans()

    def _send_plans(self) -> None:
        plan = self.forecast.plan(
            self._following, now_s=time.monotonic(), now_unix_ms=round(1000 * time.time())
        )
        plan.images.extend(self.images.planned(list(chain.from_iterable(self._next_tasks))))
        self._count_images(plan)
        if not plan.waves and not plan.images:
            return
        for target, environments in self._by_broker().items():
            if target not in self._reports:
                self._report(target, environments, self._part(plan, environments))

    def _count_images(self, plan: plan_pb2.RolloutPlan) -> None:
        """Say of each wave how many of its environments start from images of tasks."""
        parts = zip(self._next_tasks, self._following, strict=True)
        places = ((tasks, environment) for tasks, counts in parts for environment in counts)
        for wave, (tasks, environment) in zip(plan.waves, places, strict=False):
            found = [t for t in tasks if t.environment == environment and self.images.of(t)]
            wave.with_image = self._siblings * len(found)

    def _by_broker(self) -> dict[str, list[str]]:
        """Environments by their pool's brokers, which have one plan per run."""
        found: dict[str, list[str]] = defaultdict(list)
        for environment, brokers in self.brokers.items():
            found[brokers].append(environment)
        return found

    async def close(self) -> None:
        """Cancel reports and close channels."""
        background = (self._repeating, self._reading)
        tasks = [*self._reports.values(), *(task for task in background if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def _part(
        self, plan: plan_pb2.RolloutPlan, environments: Sequence[str]
    ) -> plan_pb2.RolloutPlan:
        """Part of a plan for one broker, with the broker's template names."""
        part = plan_pb2.RolloutPlan()
        part.CopyFrom(plan)
        del part.waves[:], part.images[:]
        for wave in plan.waves:
            if wave.pool in environments:
                mine = part.waves.add()
                mine.CopyFrom(wave)
                # The broker's pool may have another name than the run's environment.
                mine.pool, mine.template = "", self.templates[wave.pool]
        for image in plan.images:
            if image.template in environments:
                part.images.add(template=self.templates[image.template], image=image.image)
        return part

    def _report(self, target: str, environments: Sequence[str], plan: plan_pb2.RolloutPlan) -> None:
        task = asyncio.create_task(self._send(target, environments, plan), name=f"plan-{target}")
        self._reports[target] = task
        task.add_done_callback(lambda _: self._reports.pop(target, None))

    async def _send(
        self, target: str, environments: Sequence[str], plan: plan_pb2.RolloutPlan
    ) -> None:
        if target not in self._channels:
            self._channels[target] = dial_brokers(target)
        broker = environments_pb2_grpc.EnvBrokerServiceStub(self._channels[target])
        request = environments_pb2.ReportPlanRequest(run_id=self.run_id, plan=plan)
        try:
            answer = await broker.ReportPlan(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if target not in self._unheard:
                whose = ", ".join(environments)
                log.warning("plan not delivered to the broker of %s: %s", whose, error.details())
            self._unheard.add(target)
            for environment in environments:
                self._ready_ms.pop(environment, None)
        else:
            self._unheard.discard(target)
            told = {each.template: each.ready_by_unix_ms for each in answer.templates}
            for environment in environments:
                if self.templates[environment] in told:
                    self._ready_ms[environment] = told[self.templates[environment]]


def order_by_readiness(
    planner: PlanReporter, order: TaskOrder, groups: Iterable[RolloutGroup]
) -> list[RolloutGroup]:
    """Sort groups by the time at which their environments have free slots.

    All of them are launched and trained in any order. Groups that need not wait keep their order.
    """
    return sorted(
        groups, key=lambda each: planner.ready_ms(order.task_at(each.position).environment)
    )
