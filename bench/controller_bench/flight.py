"""A whole run of the real controller, with workers that end rollouts by a seeded plan.

A rollout lasts a log-normal time, and has a fixed number of tokens, which processes beside the
controller write to the store of the run.
"""

import asyncio
import random
import resource
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from controller_bench.run import RemoteLearners, RunShape, audit, take_over, train_to_end
from controller_bench.writer import GroupJob, WriterProcess
from etude.common.weights import VersionId
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, RolloutWorkers
from etude.trainer.routing.table import RoutingTable
from etude.v1 import environments_pb2

GROUP_SIZE, STALENESS = 8, 4
SIGMA = 1.0
"""Of the logarithm of durations."""
WRITERS = 2
"""Processes that write tokens."""
TRANSITIONS = 3
"""Of a trained group: admitted, ready, in a batch."""


class FlightSize(NamedTuple):
    """Size of one run."""

    in_flight: int
    """Rollouts that admission allows at the same time."""
    steps: int
    tokens: int
    """Of each rollout."""
    median_s: float
    """Median duration of a rollout."""
    seed: int

    @property
    def shape(self) -> RunShape:
        prompts = self.in_flight // (GROUP_SIZE * (STALENESS + 1))
        return RunShape(prompts, GROUP_SIZE, STALENESS, self.steps, self.seed)

    @property
    def groups(self) -> int:
        """Groups that are trained."""
        return self.shape.groups


class FlightFigures(NamedTuple):
    """Figures of one run."""

    wall_s: float
    """From the first group to the end of the last step."""
    cpu_s: float
    groups: int
    in_flight: int
    """Most rollouts at the same time."""
    rss_gib: float
    """Peak of the whole process, and of its start alone."""
    started_rss_gib: float
    findings: int
    """Broken invariants in the journal, its staleness bound among them."""


@dataclass(slots=True)
class PlannedRollouts(RolloutWorkers):
    """Ends each rollout after a time that its seed gives."""

    size: FlightSize
    writers: list[WriterProcess] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    began_s: float = 0.0
    began_cpu_s: float = 0.0

    def serving(self) -> VersionId:
        return self.runs[0].publishing.served or VersionId(0, 0)

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        if not self.began_s:
            self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()
        oldest = self.serving()
        self.under_way += len(order.indices)
        self.most = max(self.most, self.under_way)
        left = len(order.indices)
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def end() -> None:
            nonlocal left
            left -= 1
            self.under_way -= 1
            if not left and not done.done():
                done.set_result(None)

        draw = random.Random(order.seed)  # noqa: S311 - a simulation
        for _ in order.indices:
            loop.call_later(self.size.median_s * draw.lognormvariate(0.0, SIGMA), end)
        await done
        return GroupResult(
            records=await self._write(order, oldest),
            retried=0,
            driver="simulated",
            isolation=environments_pb2.ISOLATION_STRONG,
        )

    async def _write(self, order: GroupRequest, oldest: VersionId) -> tuple[bytes, ...]:
        """Have the tokens of a group written."""
        newest = self.serving()
        job = GroupJob(
            group_id=order.group_id,
            task_id=order.task_id,
            names=tuple(map(order.rollout_id, order.indices)),
            indices=order.indices,
            seed=order.seed,
            oldest=(oldest.epoch, oldest.number),
            newest=(newest.epoch, newest.number),
        )
        return await self.writers[order.seed % len(self.writers)].write(job)

    @property
    @override
    def num_workers(self) -> int:
        return 1

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        pass


def measure_flight(size: FlightSize) -> FlightFigures:
    """Run the controller to its end, in this process."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        return asyncio.run(_run(size, Path(name)))


def measure_empty_loop(size: FlightSize) -> float:
    """CPU seconds of an event loop in which the same rollouts end, and nothing else."""
    return asyncio.run(_sleep_alone(size))


async def _run(size: FlightSize, folder: Path) -> FlightFigures:
    workers = PlannedRollouts(size)
    run = take_over(size.shape, folder, workers, learners=RemoteLearners).run
    workers.runs.append(run)
    for _ in range(WRITERS):
        writer = await WriterProcess.start(folder, tokens=size.tokens, seed=size.seed)
        workers.writers.append(writer)
    started_rss_gib = _peak_rss_gib()
    try:
        await train_to_end(run, size.shape)
    finally:
        for writer in workers.writers:
            await writer.close()
    wall_s, cpu_s = time.perf_counter() - workers.began_s, time.process_time() - workers.began_cpu_s
    rss_gib = _peak_rss_gib()
    findings = len(audit(run, size.shape).findings)
    return FlightFigures(
        wall_s, cpu_s, size.groups, workers.most, rss_gib, started_rss_gib, findings
    )


async def _sleep_alone(size: FlightSize) -> float:
    draw = random.Random(size.seed)  # noqa: S311 - a simulation

    async def group() -> None:
        await asyncio.gather(
            *(
                asyncio.sleep(size.median_s * draw.lognormvariate(0.0, SIGMA))
                for _ in range(GROUP_SIZE)
            )
        )

    slots = asyncio.Semaphore(size.in_flight // GROUP_SIZE)

    async def slotted() -> None:
        async with slots:
            await group()

    began_s = time.process_time()
    await asyncio.gather(*(slotted() for _ in range(size.groups)))
    return time.process_time() - began_s


def _peak_rss_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
