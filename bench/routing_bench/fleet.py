"""Fleet of simulated engines under rollouts of many turns, routed by the product's own code."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from etude.trainer.controller.publishing.engines import PERIOD_S
from etude.trainer.rollouts.completion_counts import CompletionCounts
from etude.trainer.rollouts.engine_client import EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.routing.router import RouteChoice, Router, RoutingKey
from etude.trainer.routing.table import EngineState, Loads, RoutingTable, RoutingUpdate, sum_loads
from routing_bench.engine import SLOTS, BestCache, SimulatedEngine
from routing_bench.virtual_time import VirtualTimeLoop

GROUP_SIZE = 8
PROMPT_TOKENS = 1_024
TOOL_TOKENS = 96
ROLLOUTS_PER_SLOT = 2
"""Rollouts in flight per slot of an engine; the others wait for tools or in queues."""
WORKERS = 2
MAX_TURN_TOKENS = 1_500


class RandomRouter(Router):
    """Chooses any engine."""

    @override
    def choose(self, key: RoutingKey) -> RouteChoice | None:
        draw = random.Random(f"{key.rollout_id}/{key.call}")  # noqa: S311 - a simulation
        return RouteChoice(draw.choice(self.table.candidates(key.purpose)), is_suspect=False)


class RoundRobinRouter(Router):
    """Chooses the engines in turn."""

    @override
    def choose(self, key: RoutingKey) -> RouteChoice | None:
        candidates = self.table.candidates(key.purpose)
        self.mean_tokens += 1
        return RouteChoice(candidates[int(self.mean_tokens) % len(candidates)], is_suspect=False)

    @override
    def note_completion(self, num_tokens: int) -> None:
        """Keep no mean: the counter takes its place."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Figures of one simulated fleet, after its warm-up."""

    tokens_per_s: float
    imbalance: float
    """Mean over seconds of the busiest engine's tokens over the mean engine's."""
    hit_ratio: float
    """Cached blocks of prompts over those that one unbounded cache for all would have."""
    counts: CompletionCounts
    finished: int
    """Rollouts that came to their end."""
    faults: int
    """Rollouts that an error ended."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Engines, workers and rollouts of one simulation."""

    num_engines: int
    seconds: int
    warm_up: int
    seed: int = 0
    router: Callable[..., Router] = Router
    joins_at: float | None = None
    """Time at which another engine joins."""
    lost_at: float | None = None
    """Time at which the first engine is lost; the controller notices 10 s later."""
    best: BestCache = field(default_factory=BestCache)
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    routers: list[Router] = field(default_factory=list)
    counts: CompletionCounts = field(default_factory=CompletionCounts)
    finished: int = 0
    faults: int = 0
    _draw: random.Random = field(default_factory=random.Random)  # noqa: S311 - a simulation
    _lengths: dict[str, int] = field(default_factory=dict)
    _table: RoutingTable = field(default_factory=RoutingTable)
    _loads: list[Loads] = field(default_factory=lambda: [{} for _ in range(WORKERS)])

    def run(self) -> Outcome:
        """Run in virtual time."""
        loop = VirtualTimeLoop()
        try:
            return loop.run_until_complete(self._run())
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _run(self) -> Outcome:
        now_s = asyncio.get_running_loop().time
        self._draw.seed(self.seed)
        self.routers = [self.router(clock=now_s) for _ in range(WORKERS)]
        for place in range(self.num_engines):
            self._add(f"engine-{place}")
        rollouts = self._rollouts()
        in_flight = ROLLOUTS_PER_SLOT * SLOTS * self.num_engines
        tasks = [asyncio.create_task(self._work(rollouts)) for _ in range(in_flight)]
        tasks += [asyncio.create_task(self._broadcast()), asyncio.create_task(self._disturb())]
        await asyncio.sleep(self.seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self._outcome()

    def _add(self, name: str) -> None:
        self.engines[name] = SimulatedEngine(name, self.best, self._lengths.__getitem__)
        self._set_table([*(target for target, _ in self._table.engines), name])

    def _set_table(self, targets: list[str]) -> None:
        engines = tuple((target, EngineState.LIVE) for target in targets)
        self._table = RoutingTable(revision=self._table.revision + 1, engines=engines)
        for router in self.routers:
            router.use_table(self._table)

    async def _broadcast(self) -> None:
        """Exchange loads as the controller does."""
        while True:
            for place, router in enumerate(self.routers):
                others = sum_loads(each for n, each in enumerate(self._loads) if n != place)
                self._loads[place] = router.update(RoutingUpdate(self._table, others))
            await asyncio.sleep(PERIOD_S)

    async def _disturb(self) -> None:
        if self.joins_at is None or self.lost_at is None:
            return
        await asyncio.sleep(self.joins_at)
        self._add(f"engine-{len(self.engines)}")
        await asyncio.sleep(self.lost_at - self.joins_at)
        self.engines["engine-0"].is_lost = True
        await asyncio.sleep(10)
        self._set_table([t for t, _ in self._table.engines if t != "engine-0"])

    def _rollouts(self) -> Iterator[tuple[str, str, int]]:
        group = 0
        while True:
            for index in range(GROUP_SIZE):
                yield f"g{group}", f"g{group}-{index}", group
            group += 1

    async def _work(self, rollouts: Iterator[tuple[str, str, int]]) -> None:
        # Spread the start, as environments do.
        await asyncio.sleep(self._draw.random() * 20)
        for group, rollout, number in rollouts:
            try:
                await self._roll_out(group, rollout, number)
            except asyncio.CancelledError:
                raise
            except Exception:  # noqa: BLE001 - counted, and shown in the table
                self.faults += 1
            else:
                self.finished += 1

    async def _roll_out(self, group: str, rollout: str, number: int) -> None:
        draw = random.Random(f"{self.seed}/{rollout}")  # noqa: S311 - a simulation
        shared = random.Random(f"{self.seed}/{group}")  # noqa: S311 - a simulation
        ids = [shared.randrange(10, 1 << 30) for _ in range(PROMPT_TOKENS)]
        sampler = EngineSampler(
            engine_of=self.engines.__getitem__,  # type: ignore[arg-type]  # one RPC of the stub
            router=self.routers[number % WORKERS],
            group_id=group,
            rollout_id=rollout,
            end_ids={0},
            outage=OutageBudget(600),
            timeout_s=3_600,
            counts=self.counts,
        )
        for turn in range(1 + int(draw.expovariate(1 / 5))):
            length = 1 + min(MAX_TURN_TOKENS, int(draw.lognormvariate(4.2, 1.0)))
            self._lengths[rollout] = length
            done = await sampler.generate(
                ids, max_tokens=length, temperature=1.0, seed=draw.getrandbits(60) + turn
            )
            ids += done.token_ids
            ids += [draw.randrange(10, 1 << 30) for _ in range(TOOL_TOKENS)]
            await asyncio.sleep(draw.lognormvariate(-0.5, 1.0))

    def _outcome(self) -> Outcome:
        seconds = range(self.warm_up, self.seconds)
        engines = list(self.engines.values())
        ratios = []
        for second in seconds:
            tokens = [each.tokens_by_second[second] for each in engines]
            mean, busiest = sum(tokens) / len(tokens), max(tokens)
            ratios.append(busiest / mean if mean else 1.0)
        total = sum(each.tokens_by_second[second] for each in engines for second in seconds)
        return Outcome(
            tokens_per_s=total / len(seconds),
            imbalance=sum(ratios) / len(ratios),
            hit_ratio=sum(each.hits for each in engines) / max(1, self.best.hits),
            counts=self.counts,
            finished=self.finished,
            faults=self.faults,
        )
