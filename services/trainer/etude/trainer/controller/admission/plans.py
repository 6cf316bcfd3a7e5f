"""Tells the brokers of a run's environments what it will ask them for next."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from etude.common.broker_shards import target_of
from etude.common.rpc import channels
from etude.trainer.controller.admission.forecast import Forecast
from etude.trainer.controller.admission.groups import Group
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.v1 import environments_pb2, environments_pb2_grpc, plan_pb2

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""A broker that needs longer gets the next plan instead."""
REPEAT_S = 5.0
"""A plan that is not confirmed is forgotten, and what is left to a wave varies with time."""
WAVES = 3
"""Farther ahead a plan says little: doubt grows with each wave."""


@dataclass(slots=True)
class Planner:
    """Reports plans in the background.

    Without brokers or their answers nothing is different but that environments are ready later.
    """

    run_id: str = ""
    brokers: Mapping[str, str] = field(default_factory=dict)
    """By environment."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """By environment."""
    forecast: Forecast = field(default_factory=Forecast)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    _reports: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """Under way, by the broker's address."""
    _unheard: set[str] = field(default_factory=set)
    """Addresses of brokers that did not take the last plan."""
    _ready_ms: dict[str, int] = field(default_factory=dict)
    """By environment, when its broker could give one more, in Unix milliseconds; 0: at once."""
    _following: Sequence[Mapping[str, int]] = ()
    """Environments by name, of each wave behind the newest one."""
    _repeating: "asyncio.Task[None] | None" = None

    def begin_phase(self) -> None:
        """Another phase has another rhythm."""
        self.forecast = Forecast()
        self._following = ()

    def wave(self, following: Sequence[Sequence[str]], *, siblings: int) -> None:
        """A wave of groups was launched; report those that follow.

        Args:
            following: environment of each group, of the next waves in their order.
            siblings: rollouts of a group.
        """
        self.forecast.started(time.monotonic())
        self._following = [
            {name: siblings * count for name, count in Counter(names).items()}
            for names in following
        ]
        self._tell()
        if self._repeating is None and self.brokers:
            self._repeating = asyncio.create_task(self._repeat(), name="repeat-plans")

    def ready_ms(self, environment: str) -> int:
        """When its broker could give one more environment; 0: at once, or nobody knows."""
        at_ms = self._ready_ms.get(environment, 0)
        return at_ms if at_ms > 1000 * time.time() else 0

    def stepped(self) -> None:
        """A step begins to train, which says when the next wave comes."""
        self.forecast.stepped(time.monotonic())
        self._tell()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            self._tell()

    def _tell(self) -> None:
        plan = self.forecast.plan(
            self._following, now_s=time.monotonic(), now_unix_ms=round(1000 * time.time())
        )
        if plan is None:
            return
        for target, environments in self._by_broker().items():
            if target not in self._reports:
                self._report(target, environments, self._part(plan, environments))

    def _by_broker(self) -> dict[str, list[str]]:
        """Environments by their broker's address; it keeps one plan of a run for all of them."""
        found: dict[str, list[str]] = defaultdict(list)
        for environment, brokers in self.brokers.items():
            found[target_of(self.run_id, brokers)].append(environment)
        return found

    async def close(self) -> None:
        """Let go of everything."""
        tasks = [*self._reports.values(), *([self._repeating] if self._repeating else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def _part(
        self, plan: plan_pb2.RolloutPlan, environments: Sequence[str]
    ) -> plan_pb2.RolloutPlan:
        """The waves that the broker of these environments will see, in its own words."""
        part = plan_pb2.RolloutPlan()
        part.CopyFrom(plan)
        del part.waves[:]
        for wave in plan.waves:
            if wave.pool in environments:
                mine = part.waves.add()
                mine.CopyFrom(wave)
                # The broker's pool may have another name than the run's environment has.
                mine.pool, mine.template = "", self.templates[wave.pool]
        return part

    def _report(self, target: str, environments: Sequence[str], plan: plan_pb2.RolloutPlan) -> None:
        task = asyncio.create_task(self._send(target, environments, plan), name=f"plan-{target}")
        self._reports[target] = task
        task.add_done_callback(lambda _: self._reports.pop(target, None))

    async def _send(
        self, target: str, environments: Sequence[str], plan: plan_pb2.RolloutPlan
    ) -> None:
        if target not in self._channels:
            self._channels[target] = channels.dial(target)
        broker = environments_pb2_grpc.EnvBrokerServiceStub(self._channels[target])
        request = environments_pb2.ReportPlanRequest(run_id=self.run_id, plan=plan)
        try:
            answer = await broker.ReportPlan(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if target not in self._unheard:
                whose = ", ".join(environments)
                log.warning("no plan reached the broker of %s: %s", whose, error.details())
            self._unheard.add(target)
            for environment in environments:
                self._ready_ms.pop(environment, None)
        else:
            self._unheard.discard(target)
            told = {each.template: each.ready_by_unix_ms for each in answer.templates}
            for environment in environments:
                if self.templates[environment] in told:
                    self._ready_ms[environment] = told[self.templates[environment]]


def soonest(planner: Planner, order: TaskOrder, groups: Iterable[Group]) -> list[Group]:
    """Groups in the order in which they should ask for environments: those first that get some.

    What they are, and that all of them are trained, does not depend on it. Of those that need not
    wait, the order stays as it was.
    """
    return sorted(groups, key=lambda each: planner.ready_ms(order.at(each.position).environment))


def upcoming(order: TaskOrder, *, first: int, left: int, wave: int) -> list[list[str]]:
    """Environments of the groups that the next versions will admit, version by version.

    Args:
        order: of tasks.
        first: position of the next one.
        left: groups that the phase still admits.
        wave: groups that a version admits.
    """
    count = max(0, min(left, len(order) - first, WAVES * wave))
    ahead = [order.at(first + n).environment for n in range(count)]
    return [ahead[start : start + wave] for start in range(0, count, wave)]
