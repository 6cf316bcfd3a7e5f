"""A run of the real controller on a folder, without a learner, engines or environments.

Admission, batch rule, ledger, journal, publishing and records are the product's own. Learner and
weights are those of the tests of the controller: a step takes no time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.trainer_simulation.chat import save_byte_tokenizer
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.blobs import Store, open_store
from etude.common.checkpoints.manifest import StoredCheckpoint
from etude.common.role_inputs import ResolvedRun
from etude.common.run_folder.record import FolderRecord
from etude.trainer.compactor.report import CompactorClient, CompactorReport
from etude.trainer.compactor.schedule import EMPTY
from etude.trainer.controller.admission.plans import PlanReporter
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.controller.checkpoints.recovery import open_run
from etude.trainer.controller.inputs import TaskSets
from etude.trainer.controller.journal.audit import JournalAudit, audit_journal
from etude.trainer.controller.program import train
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.run import Run, RunServices
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.learner.protocol import Learners
from etude.trainer.rollouts.protocol import RolloutWorkers
from etude.trainer.rollouts.tasks import Task


class RunShape(NamedTuple):
    """Shape of one run."""

    prompts_per_step: int
    group_size: int
    staleness: int
    """0 for mode Sync."""
    steps: int
    seed: int
    steps_per_checkpoint: int = 1_000_000

    @property
    def groups(self) -> int:
        """Groups that are trained."""
        return self.prompts_per_step * self.steps


class RemoteCompactor(CompactorClient):
    """A compactor on another machine, with nothing to fold yet."""

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        return CompactorReport(
            chain=EMPTY, is_overdue=False, cut_off_at=None, written=(), collected=0, failures=()
        )


class OpenedController(NamedTuple):
    """A controller that took a run over."""

    run: Run
    checkpoint: StoredCheckpoint | None
    """From which it goes on; None in a new run."""


def open_controller(shape: RunShape, folder: Path, workers: RolloutWorkers) -> Run:
    """Open a new run below a folder."""
    return take_over(shape, folder, workers).run


class RemoteLearners(SimulatedLearners):
    """Learner ranks on other machines: they read the rollouts of a batch there."""

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        return await SimulatedLearners.policy_step(self, replace(batch, stored=()))

    @override
    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        """Leave them to the other nodes."""


def take_over(
    shape: RunShape,
    folder: Path,
    workers: RolloutWorkers,
    *,
    learners: Callable[[Store], Learners] = SimulatedLearners,
) -> OpenedController:
    """Open the run below a folder, as the successor of whatever controller it had."""
    resolved = ResolvedRun.model_validate(
        {"name": "bench", "uid": "bench", "spec": _spec(shape, folder)}
    )
    store = open_store((folder / "run").as_uri())
    opened = open_run(
        store, run_uid="bench", phases=resolved.spec.phases, added_tokens=(), holder="bench"
    )
    services = RunServices(
        learners=learners(store),
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
    return OpenedController(run, opened.checkpoint)


async def train_to_end(
    run: Run, shape: RunShape, checkpoint: StoredCheckpoint | None = None
) -> None:
    """Train as many tasks as the run needs."""
    tasks = tuple(
        Task(task_id=f"train/t{i}", uri=f"file:///tasks/t{i}", environment="repos")
        for i in range(shape.groups)
    )
    orders = {"rl": TaskOrder(tasks=tasks, seed=shape.seed)}
    await train(run, TaskSets(orders=orders, evaluations={}), checkpoint=checkpoint)


def audit(run: Run, shape: RunShape) -> JournalAudit:
    """Audit the journal of a run, its bound of staleness among the rest."""
    journal = {info.key: run.store.get(info.key) for info in run.store.list("journal/")}
    return audit_journal(journal, max_staleness=shape.staleness)


def _spec(shape: RunShape, folder: Path) -> dict[str, Any]:
    mode = "FullyAsync" if shape.staleness else "Sync"
    pool = {"templates": [{"name": "python", "trust": "Trusted"}]}
    return {
        "model": {"uri": "file:///model"},
        "storage": {"uri": (folder / "run").as_uri()},
        "weights": {"dtype": "Float32"},
        "checkpointing": {"everySteps": shape.steps_per_checkpoint},
        "phases": [
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": shape.steps,
                "seed": shape.seed,
                "optimizer": {"learningRate": "1e-3"},
                "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
                "algorithm": {
                    "promptsPerStep": shape.prompts_per_step,
                    "groupSize": shape.group_size,
                },
                "asyncLimits": {"mode": mode, "maxStalenessVersions": shape.staleness},
            }
        ],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "success", "function": "Verifier"}]},
        },
    }
