"""Run: the handles that the controller works with, assembled from what it opened."""

from dataclasses import dataclass
from typing import NamedTuple

from etude.agent.chat import ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.blobs import Store
from etude.common.errors import StoreError
from etude.common.process import root_causes
from etude.common.role_inputs import ResolvedRun
from etude.common.run_folder.record import RunRecord
from etude.trainer import metrics
from etude.trainer.compactor.report import CompactorClient
from etude.trainer.controller.admission.content_collector import ContentCollector
from etude.trainer.controller.admission.dispatch import RolloutDispatcher
from etude.trainer.controller.admission.dropping import QuarantineFilter
from etude.trainer.controller.admission.plans import PlanReporter
from etude.trainer.controller.checkpoints.manager import CheckpointManager
from etude.trainer.controller.checkpoints.recovery import JournaledLedger, OpenedRun
from etude.trainer.controller.checkpoints.saver import CheckpointSaver
from etude.trainer.controller.progress import RunProgress, Throughput
from etude.trainer.controller.publishing.compaction import KEYFRAME_OVERDUE, CompactionMonitor
from etude.trainer.controller.publishing.engines import LAGGING, Engines
from etude.trainer.controller.publishing.pipeline import PublishPipeline
from etude.trainer.controller.publishing.versions import VersionChain
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.policy_metrics import set_expert_metrics
from etude.trainer.controller.reporting.recorder import RunRecorder
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.trainer.controller.reporting.reports import RunReports
from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.protocol import Learners
from etude.trainer.rollouts.protocol import RolloutWorkers
from etude.v1 import journal_pb2, run_pb2


class RunServices(NamedTuple):
    """Actors and clients that a run drives."""

    learners: Learners
    workers: RolloutWorkers
    engines: Engines
    compactor: CompactorClient
    record: RunRecord
    plans: PlanReporter


class _SharedHandles(NamedTuple):
    """Handles and partners on which several others are built."""

    progress: RunProgress
    reporter: RunReporter
    commands: RunCommands
    opened: OpenedRun
    services: RunServices
    store: Store


@dataclass(slots=True, kw_only=True)
class Run:
    """The handles of a run, one for each concern."""

    store: Store
    book: JournaledLedger
    progress: RunProgress
    reporter: RunReporter
    commands: RunCommands
    learners: Learners
    publishing: PublishPipeline
    checkpoints: CheckpointManager
    dispatcher: RolloutDispatcher
    plans: PlanReporter
    throughput: Throughput

    def __post_init__(self) -> None:
        self.reporter.write_status = self._write_status

    @classmethod
    def assemble(
        cls,
        resolved: ResolvedRun,
        opened: OpenedRun,
        services: RunServices,
        *,
        store: Store,
        holder: str,
        chat: ChatFormat | None,
    ) -> "Run":
        """Build the handles of a run that this process has opened."""
        progress = RunProgress(
            resolved=resolved, epoch=opened.epoch, cursor=opened.cursor, figures=opened.figures
        )
        shared = _SharedHandles(
            progress=progress,
            reporter=RunReporter(
                progress=progress,
                reports=RunReports(resolved.uid, opened.epoch),
                recorder=RunRecorder(services.record),
            ),
            commands=RunCommands(resolved.spec, resolved.generation),
            opened=opened,
            services=services,
            store=store,
        )
        return cls(
            store=store,
            book=opened.book,
            progress=progress,
            reporter=shared.reporter,
            commands=shared.commands,
            learners=services.learners,
            publishing=_publish_pipeline(shared, holder=holder),
            checkpoints=_checkpoint_manager(shared),
            dispatcher=_rollout_dispatcher(shared, chat=chat),
            plans=services.plans,
            throughput=Throughput(),
        )

    def quarantine_filter(self) -> QuarantineFilter:
        """Create a filter of rollouts that marked weights sampled."""
        return QuarantineFilter(self.store, self.book, self.reporter, self.publishing.store_retry)

    def enter_phase(self, phase: Phase) -> None:
        self.progress.enter_phase(phase)
        message = f"phase {phase.name} continues from step {self.progress.cursor.step}"
        self.reporter.record_event("PhaseStarted", message)
        self.reporter.update_status()

    def complete_step(self, result: StepResult, *, seconds: float) -> None:
        """Advance by one optimiser step, journal it, and report it."""
        self.progress.complete_step(seconds, result.data_cursor)
        self.checkpoints.count_step()
        cursor, status = self.progress.cursor, self.reporter.status
        if result.is_skipped:
            self.reporter.record_event(
                "BatchSkipped",
                f"phase {cursor.phase}, step {cursor.step}: loss or gradient was not finite",
                warning=True,
            )
        body = journal_pb2.JournalStep(
            phase=cursor.phase,
            step=cursor.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            weight_digest=result.weight_digest,
            data_cursor=result.data_cursor,
        )
        self.book.write(journal_pb2.JournalRecord(step=body))
        status.loss = result.loss
        status.tokens_per_second = result.tokens / max(seconds, 1e-9)
        status.last_step_unix_ms = int(self.progress.clock() * 1000)
        metrics.LOSS.set(result.loss)
        metrics.GRAD_NORM.set(result.grad_norm)
        set_expert_metrics(result)
        metrics.TOKENS_PER_SECOND.set(status.tokens_per_second)
        metrics.STEP.set(cursor.global_step)
        self.reporter.update_status()

    @property
    def store_problem(self) -> str:
        """Last error of the store for a user that waits for it; empty while it works."""
        return (
            self.book.journal.store_retry.problem
            or self.publishing.store_retry.problem
            or self.publishing.upload_retry.problem
            or self.reporter.recorder.problem
        )

    def _write_status(self, status: run_pb2.RunStatus) -> None:
        self.progress.write_status(status)
        status.observed_generation = self.commands.generation
        ledger, figures, counts = self.book.ledger, self.progress.figures, status.rollouts
        counts.completed, counts.trained = ledger.accepted + figures.evaluated, ledger.trained
        counts.masked, counts.dropped = ledger.masked, ledger.discarded
        counts.retried = figures.retried
        self.throughput.write_status(status)
        engines = self.publishing.engines
        status.engines, status.engine_limit = len(engines.rotation), engines.num_addressed
        status.lent_engines = engines.num_lent
        del status.lender_targets[:]
        status.lender_targets.extend(self.commands.lenders)
        self._write_problem(status)

    def _write_problem(self, status: run_pb2.RunStatus) -> None:
        publishing = self.publishing
        overdue = publishing.compaction.overdue_problem(publishing.newest_number)
        if self.store_problem:
            status.reason, status.message = StoreError.reason, self.store_problem
        elif overdue:
            status.reason, status.message = KEYFRAME_OVERDUE, overdue
        elif publishing.engines.lag_problem:
            status.reason, status.message = LAGGING, publishing.engines.lag_problem
        elif status.reason in {StoreError.reason, KEYFRAME_OVERDUE, LAGGING}:
            status.reason = status.message = ""


def _publish_pipeline(shared: _SharedHandles, *, holder: str) -> PublishPipeline:
    """Pipeline of versions, which goes on after the last published one."""
    opened, services, resolved = shared.opened, shared.services, shared.progress.resolved
    return PublishPipeline(
        progress=shared.progress,
        reporter=shared.reporter,
        commands=shared.commands,
        book=opened.book,
        learners=services.learners,
        engines=services.engines,
        chain=VersionChain(store=shared.store, run_uid=resolved.uid, holder=holder),
        compaction=CompactionMonitor(
            client=services.compactor,
            epoch=opened.epoch,
            versions=resolved.spec.weights.versions_per_keyframe,
            first=opened.next_version,
        ),
        next_version=opened.next_version,
    )


def _checkpoint_manager(shared: _SharedHandles) -> CheckpointManager:
    """Manager of checkpoints of the branch that was opened."""
    opened = shared.opened
    return CheckpointManager(
        progress=shared.progress,
        reporter=shared.reporter,
        commands=shared.commands,
        book=opened.book,
        saver=CheckpointSaver(shared.store, opened.book, shared.services.learners),
        branch=opened.branch,
    )


def _rollout_dispatcher(shared: _SharedHandles, *, chat: ChatFormat | None) -> RolloutDispatcher:
    """Dispatcher of groups to workers and engines."""
    return RolloutDispatcher(
        progress=shared.progress,
        reporter=shared.reporter,
        book=shared.opened.book,
        workers=shared.services.workers,
        engines=shared.services.engines,
        chat=chat,
        collector=ContentCollector(
            shared.store,
            shared.opened.book.journal,
            is_restored=shared.opened.branch.number > 0,
        ),
    )


def root_cause(error: BaseException) -> BaseException:
    """First error of nested exception groups."""
    return next(root_causes(error))
