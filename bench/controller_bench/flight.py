"""A whole run of the real controller, with workers that end rollouts by a seeded plan.

Admission, batch rule, ledger, journal, publishing and records are the product's own, on a folder.
Learner and weights are those of the tests of the controller: a step takes no time. A rollout lasts
a log-normal time and returns a record of a fixed number of tokens.
"""

import asyncio
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.trainer_simulation.chat import save_byte_tokenizer
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.blobs import open_store
from etude.common.role_inputs import ResolvedRun
from etude.common.run_folder.record import FolderRecord
from etude.common.weights import VersionId
from etude.trainer.compactor.report import CompactorClient, CompactorReport
from etude.trainer.compactor.schedule import EMPTY
from etude.trainer.controller.admission.plans import PlanReporter
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.controller.checkpoints.recovery import open_run
from etude.trainer.controller.inputs import TaskSets
from etude.trainer.controller.journal.audit import audit_journal
from etude.trainer.controller.program import train
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.run import Run, RunServices
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, RolloutWorkers
from etude.trainer.rollouts.tasks import Task
from etude.trainer.routing.table import RoutingTable
from etude.trainer.seeding import derive_seed
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
    def prompts_per_step(self) -> int:
        return self.in_flight // (GROUP_SIZE * (STALENESS + 1))

    @property
    def groups(self) -> int:
        """Groups that are trained."""
        return self.prompts_per_step * self.steps


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
        records = [self._record(order, index, oldest) for index in order.indices]
        found = await asyncio.gather(*records)
        return GroupResult(
            records=tuple(found),
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

    async def _record(self, order: GroupRequest, index: int, oldest: VersionId) -> bytes:
        draw = random.Random(derive_seed(order.seed, index))  # noqa: S311 - a simulation
        await asyncio.sleep(self.size.median_s * draw.lognormvariate(0.0, SIGMA))
        newest = self.serving()
        self.under_way -= 1
        name, reward = order.rollout_id(index), float(draw.random() < 0.5)
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


class RemoteCompactor(CompactorClient):
    """A compactor on another machine, with nothing to fold yet."""

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        return CompactorReport(
            chain=EMPTY, is_overdue=False, cut_off_at=None, written=(), collected=0, failures=()
        )


def measure_flight(size: FlightSize) -> FlightFigures:
    """Run the controller to its end, in this process."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        return asyncio.run(_run(size, Path(name)))


def measure_empty_loop(size: FlightSize) -> float:
    """CPU seconds of an event loop in which the same rollouts end, and nothing else."""
    return asyncio.run(_sleep_alone(size))


async def _run(size: FlightSize, folder: Path) -> FlightFigures:
    resolved = ResolvedRun.model_validate(
        {"name": "bench", "uid": "bench", "spec": _spec(size, folder)}
    )
    store = open_store((folder / "run").as_uri())
    opened = open_run(
        store, run_uid="bench", phases=resolved.spec.phases, added_tokens=(), holder="bench"
    )
    workers = PlannedRollouts(size)
    services = RunServices(
        learners=SimulatedLearners(store),
        workers=workers,
        engines=Engines((), timeout_s=1.0),
        compactor=RemoteCompactor(),
        record=FolderRecord(folder / "record"),
        plans=PlanReporter(),
    )
    save_byte_tokenizer(folder)
    run = Run.assemble(
        resolved, opened, services, store=store, holder="bench", chat=ChatFormat.load(folder)
    )
    workers.runs.append(run)
    started_rss_gib = _peak_rss_gib()
    tasks = tuple(
        Task(task_id=f"train/t{i}", uri=f"file:///tasks/t{i}", environment="repos")
        for i in range(size.groups)
    )
    orders = {"rl": TaskOrder(tasks=tasks, seed=size.seed)}
    await train(run, TaskSets(orders=orders, evaluations={}), checkpoint=None)
    wall_s, cpu_s = time.perf_counter() - workers.began_s, time.process_time() - workers.began_cpu_s
    journal = {info.key: store.get(info.key) for info in store.list("journal/")}
    rss_gib = _peak_rss_gib()
    audit = audit_journal(journal, max_staleness=STALENESS)
    return FlightFigures(
        wall_s, cpu_s, size.groups, workers.most, rss_gib, started_rss_gib, len(audit.findings)
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


def _spec(size: FlightSize, folder: Path) -> dict[str, Any]:
    pool = {"templates": [{"name": "python", "trust": "Trusted"}]}
    return {
        "model": {"uri": "file:///model"},
        "storage": {"uri": (folder / "run").as_uri()},
        "weights": {"dtype": "Float32"},
        "checkpointing": {"everySteps": 1_000_000},
        "phases": [
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": size.steps,
                "seed": size.seed,
                "optimizer": {"learningRate": "1e-3"},
                "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
                "algorithm": {"promptsPerStep": size.prompts_per_step, "groupSize": GROUP_SIZE},
                "asyncLimits": {"mode": "FullyAsync", "maxStalenessVersions": STALENESS},
                "rollout": {"maxConcurrent": size.in_flight},
            }
        ],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "success", "function": "Verifier"}]},
        },
    }


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
