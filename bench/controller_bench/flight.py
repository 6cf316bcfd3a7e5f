"""A whole run of the real controller, with workers that end rollouts by a seeded plan.

A rollout lasts a log-normal time and returns a record of a fixed number of tokens.
"""

import asyncio
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from controller_bench.run import RunShape, audit, open_controller, train_to_end
from etude.common.weights import VersionId
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, RolloutWorkers
from etude.trainer.routing.table import RoutingTable
from etude.v1 import environments_pb2, journal_pb2, rewards_pb2, rollout_pb2, weights_pb2

GROUP_SIZE, STALENESS = 8, 4
SIGMA = 1.0
"""Of the logarithm of durations."""
PROMPT_TOKENS = 32
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
    runs: list[Run] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    began_s: float = 0.0
    began_cpu_s: float = 0.0
    _links: dict[tuple[VersionId, VersionId], bytes] = field(default_factory=dict)

    def serving(self) -> VersionId:
        return self.runs[0].publishing.served or VersionId(0, 0)

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        if not self.began_s:
            self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()
        oldest = self.serving()
        self.under_way += len(order.indices)
        self.most = max(self.most, self.under_way)
        found: dict[int, bytes] = {}
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def end(index: int) -> None:
            found[index] = self._record(order, index, oldest)
            if len(found) == len(order.indices):
                done.set_result(None)

        draw = random.Random(order.seed)  # noqa: S311 - a simulation
        for index in order.indices:
            loop.call_later(self.size.median_s * draw.lognormvariate(0.0, SIGMA), end, index)
        await done
        return GroupResult(
            records=tuple(found[index] for index in order.indices),
            retried=0,
            driver="simulated",
            isolation=environments_pb2.ISOLATION_STRONG,
        )

    @property
    @override
    def num_workers(self) -> int:
        return 1

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        pass

    def _record(self, order: GroupRequest, index: int, oldest: VersionId) -> bytes:
        newest = self.serving()
        self.under_way -= 1
        name, reward = order.rollout_id(index), float((order.seed >> index) & 1)
        rest = journal_pb2.JournalRollout(
            rollout=rollout_pb2.Rollout(
                rollout_id=name,
                group_id=order.group_id,
                task_id=order.task_id,
                index=index,
                seed=order.seed,
                costs=rollout_pb2.Costs(turns=1, completion_tokens=self.size.tokens),
                ending=rollout_pb2.ENDING_STOPPED,
                oldest=oldest.to_proto(),
                newest=newest.to_proto(),
            ),
            reward=rewards_pb2.RewardRecord(rollout_id=name, reward=reward, success=reward),
        )
        # Joined messages are one message: tokens are encoded once for each pair of versions.
        return self._encoded_links(oldest, newest) + rest.SerializeToString()

    def _encoded_links(self, oldest: VersionId, newest: VersionId) -> bytes:
        if (oldest, newest) not in self._links:
            link = _link(self.size, oldest, newest)
            whole = journal_pb2.JournalRollout(rollout=rollout_pb2.Rollout(links=[link]))
            self._links[oldest, newest] = whole.SerializeToString()
        return self._links[oldest, newest]


def measure_flight(size: FlightSize) -> FlightFigures:
    """Run the controller to its end, in this process."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        return asyncio.run(_run(size, Path(name)))


def measure_empty_loop(size: FlightSize) -> float:
    """CPU seconds of an event loop in which the same rollouts end, and nothing else."""
    return asyncio.run(_sleep_alone(size))


async def _run(size: FlightSize, folder: Path) -> FlightFigures:
    workers = PlannedRollouts(size)
    run = open_controller(size.shape, folder, workers)
    workers.runs.append(run)
    started_rss_gib = _peak_rss_gib()
    await train_to_end(run, size.shape)
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


def _link(size: FlightSize, oldest: VersionId, newest: VersionId) -> rollout_pb2.Link:
    draw = random.Random(size.seed)  # noqa: S311 - a simulation
    sampled = size.tokens - PROMPT_TOKENS
    span = weights_pb2.PolicySpan(
        sampled=newest.to_proto(),
        context=oldest.to_proto(),
        start=PROMPT_TOKENS,
        end=size.tokens,
        replica="engine-0",
    )
    ids: Sequence[int] = [draw.randrange(200) for _ in range(size.tokens)]
    return rollout_pb2.Link(
        token_ids=ids,
        loss_mask=bytes(PROMPT_TOKENS) + b"\x01" * sampled,
        sampler_logprobs=[0.0] * PROMPT_TOKENS + [-draw.random() for _ in range(sampled)],
        spans=[span],
    )


def _peak_rss_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
