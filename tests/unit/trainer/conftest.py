"""A whole run over simulated learners and rollouts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer_simulation.chat import save_byte_tokenizer
from tests.support.trainer_simulation.workers import SimulatedLearners, SimulatedRollouts
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.blobs import MemoryStore
from etude.common.role_inputs import ResolvedRun
from etude.common.run_folder.record import StoreRecord, latest_rows
from etude.common.weights import VersionId
from etude.trainer.compactor.compactor import Compactor, CompactorConfig
from etude.trainer.compactor.report import CompactorClient, CompactorReport
from etude.trainer.controller.admission.plans import PlanReporter
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.controller.checkpoints.recovery import open_run
from etude.trainer.controller.inputs import TaskSets
from etude.trainer.controller.journal.audit import JournalAudit, audit_journal
from etude.trainer.controller.program import train
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.run import Run, RunServices, root_cause
from etude.trainer.rollouts.tasks import Task

SFT_STEPS = 4
RL_STEPS = 6


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(folder)
    return ChatFormat.load(folder)


def spec(*, staleness: int = 0, every_steps: int = 2, **fields: object) -> dict[str, Any]:
    mode = "FullyAsync" if staleness else "Sync"
    optimizer = {"learningRate": "1e-3"}
    task_set = {"name": "train", "uri": "file:///tasks", "environment": "repos"}
    pool = {"templates": [{"name": "python", "trust": "Trusted"}]}
    return {
        "model": {"uri": "file:///model"},
        "storage": {"uri": "file:///run"},
        "weights": {"dtype": "Float32", "advanced": {"retainVersions": 2}},
        "checkpointing": {"everySteps": every_steps, "keepLast": 2},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": SFT_STEPS,
                "optimizer": optimizer,
                "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
            },
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": RL_STEPS,
                "seed": 5,
                "optimizer": optimizer,
                "tasks": [task_set],
                "algorithm": {"promptsPerStep": 2, "groupSize": 3},
                "asyncLimits": {"mode": mode, "maxStalenessVersions": staleness},
                "rollout": {"maxInfraFailurePercent": 40},
            },
        ],
        "evaluation": [
            {"name": "held-out", "tasks": task_set, "phase": "rl", "everySteps": 3, "limit": 2}
        ],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "success", "function": "Verifier"}]},
        },
        **fields,
    }


@dataclass
class Beside(CompactorClient):
    """A compactor in a thread of this process."""

    compactor: Compactor

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        return await asyncio.to_thread(self.compactor.run_round, epoch)


def _task_sets(phases: Sequence[Phase]) -> TaskSets:
    tasks = tuple(
        Task(
            task_id=f"train/t{i}",
            uri=f"file:///tasks/t{i}",
            environment="repos",
            label=("easy", "hard")[i % 2],
        )
        for i in range(30)
    )
    held_out = tuple(
        Task(task_id=f"held-out/t{i}", uri=f"file:///h/t{i}", environment="repos") for i in range(4)
    )
    return TaskSets(
        orders={p.name: TaskOrder(tasks=tasks, seed=p.seed) for p in phases if p.is_rl},
        evaluations={"held-out": held_out},
    )


@dataclass
class World:
    """What outlives a controller: the store."""

    chat: ChatFormat
    spec: dict[str, Any]
    folder: Path
    store: MemoryStore = field(default_factory=MemoryStore)
    fault_share: float = 0.0
    runs: list[Run] = field(default_factory=list)
    resume: dict[str, int] | None = None

    def start(self) -> tuple[Run, TaskSets, Any]:
        """A new controller takes over."""
        resolved = ResolvedRun.model_validate(
            {"name": "demo", "uid": "run", "spec": self.spec, "resume": self.resume}
        )
        phases = resolved.spec.phases
        opened = open_run(
            self.store,
            run_uid="run",
            phases=phases,
            added_tokens=resolved.spec.model.add_tokens,
            holder="test",
            resume=resolved.resume,
        )
        holder: list[Run] = []
        services = RunServices(
            learners=SimulatedLearners(self.store),
            workers=SimulatedRollouts(
                lambda: holder[0].publishing.served or VersionId(0, 0),
                self.fault_share,
                store=self.store,
                chat=self.chat,
            ),
            engines=Engines((), timeout_s=1.0),
            compactor=Beside(self._compactor(resolved, opened.epoch)),
            record=StoreRecord(self.store),
            plans=PlanReporter(),
        )
        run = Run.assemble(
            resolved, opened, services, store=self.store, holder="test", chat=self.chat
        )
        holder.append(run)
        self.runs.append(run)
        return run, _task_sets(phases), opened.checkpoint

    def _compactor(self, resolved: ResolvedRun, epoch: int) -> Compactor:
        config = CompactorConfig(
            run="run",
            epoch=epoch,
            storage=resolved.spec.storage,
            folder=self.folder / str(epoch),
            weights=resolved.spec.weights,
            collect_every_s=0.0,
        )
        return Compactor(config, store=self.store)

    async def train(self, prepare: Callable[[Run], None] = lambda _run: None) -> bool:
        run, sets, checkpoint = self.start()
        prepare(run)
        async with asyncio.timeout(60):
            return await train(run, sets, checkpoint=checkpoint)

    @property
    def digest(self) -> str:
        learners = self.runs[-1].learners
        assert isinstance(learners, SimulatedLearners)
        return learners.weights

    def audit(self, **arguments: Any) -> JournalAudit:
        return audit_journal(self.store.objects, **arguments)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [dict(r) for r in latest_rows(StoreRecord(self.store).rows()) if r["kind"] == kind]

    async def crash(self, *, after: int) -> None:
        """One controller that dies after so many steps, as with kill -9, its checkpoints stored."""

        def prepare(run: Run) -> None:
            assert isinstance(run.learners, SimulatedLearners)
            run.learners.steps_until_crash = after
            run.learners.before_crash = run.checkpoints.wait_stored

        with pytest.raises(ExceptionGroup) as caught:
            await self.train(prepare)
        assert isinstance(root_cause(caught.value), ConnectionError)


@pytest.fixture(scope="session")
def make_world(chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """A store before its first controller; further arguments change the spec."""

    def make(
        store: MemoryStore | None = None,
        *,
        given: dict[str, Any] | None = None,
        fault_share: float = 0.0,
        **changed: Any,
    ) -> World:
        folder = tmp_path_factory.mktemp("compactor")
        return World(chat, given or spec(**changed), folder, store or MemoryStore(), fault_share)

    return make


@pytest.fixture(scope="session")
def uninterrupted(make_world: Callable[..., World]) -> str:
    """The weights that every other way through the run must lead to."""
    world = make_world()
    assert asyncio.run(world.train())
    return world.digest
