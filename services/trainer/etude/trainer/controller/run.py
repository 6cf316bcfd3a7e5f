"""State of a run, and its bookkeeping between steps."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from etude.agent.chat import ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.blobs import Store
from etude.common.checkpoints.manifest import Reason, StoredCheckpoint
from etude.common.errors import EtudeError, StoreError
from etude.common.role_inputs import ResolvedRun
from etude.common.weights import EpochRecord, VersionId
from etude.trainer import metrics
from etude.trainer.controller.admission.plans import PlanReporter
from etude.trainer.controller.checkpoints.cadence import CheckpointCadence
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.checkpoints.saver import CheckpointSaver, chain_keyframe
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, Figures
from etude.trainer.controller.publishing.compaction import KEYFRAME_OVERDUE, CompactionMonitor
from etude.trainer.controller.publishing.engines import LAGGING, Engines, VersionRefusedError
from etude.trainer.controller.publishing.in_flight import InFlightQueue
from etude.trainer.controller.publishing.versions import BaseLostError, EncodedVersion, VersionChain
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.progress import median_step_s, phase_progress
from etude.trainer.controller.reporting.recorder import RunRecorder
from etude.trainer.controller.reporting.reports import RunReports
from etude.trainer.controller.reporting.rows import Row, RowPosition
from etude.trainer.controller.reporting.throughput import Throughput
from etude.trainer.controller.store_retry import StoreRetry
from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.protocol import Learners
from etude.trainer.rollouts.protocol import RolloutWorkers
from etude.v1 import journal_pb2, run_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

EWMA = 0.1
"""Weight of the newest batch in the smoothed reward."""

KEPT_STEP_TIMES = 200


class RunFailedError(EtudeError):
    """The run cannot continue, and a restart would not help."""

    reason: ClassVar[str] = "RunFailed"


@dataclass(slots=True, kw_only=True)
class Run:
    """State and services that the phases share."""

    resolved: ResolvedRun
    epoch: int
    store: Store
    book: JournaledLedger
    cursor: Cursor
    figures: Figures
    next_version: int
    learners: Learners
    rollouts: RolloutWorkers
    engines: Engines
    saver: CheckpointSaver
    versions: VersionChain
    compaction: CompactionMonitor
    reports: RunReports
    commands: RunCommands
    recorder: RunRecorder
    chat: ChatFormat
    branch: Branch = field(default_factory=Branch)
    """The run's branch of checkpoints."""
    plans: PlanReporter = field(default_factory=PlanReporter)
    clock: Callable[[], float] = time.time
    progress_s: float = field(default_factory=time.monotonic)
    """Time of the last progress, for the watchdog."""
    store_retry: StoreRetry = field(default_factory=StoreRetry)
    """Retries of writes that a step waits for."""
    upload_retry: StoreRetry = field(default_factory=StoreRetry)
    """Retries of uploads, which run during the steps."""
    cadence: CheckpointCadence = field(default_factory=CheckpointCadence)
    throughput: Throughput = field(default_factory=Throughput)
    in_flight: InFlightQueue[EncodedVersion] = field(
        default_factory=lambda: InFlightQueue((VersionRefusedError, BaseLostError))
    )
    batch_sequence: int = 0
    """Journal record of the newest batch in the weights."""
    served: VersionId | None = None
    """The newest version that engines serve."""
    publish_s: float = 0.0
    """Duration of the newest version's publishing, from encoding to manifest."""
    unserved: Row | None = None
    """Row of a published version that engines do not serve yet."""

    @property
    def phase(self) -> Phase:
        """The active phase."""
        return next(p for p in self.resolved.spec.phases if p.name == self.cursor.phase)

    @property
    def last_step(self) -> int:
        """Last step of the active phase, as far as that is known."""
        return self.cursor.ends.get(self.cursor.phase, self.phase.max_steps)

    @property
    def newest_number(self) -> int:
        """Number of the newest published version."""
        policy = self.cursor.policy
        if policy is not None and policy[0] == self.epoch:
            return policy[1]
        return self.next_version - 1 - len(self.in_flight)

    def place(self) -> RowPosition:
        """Current position, for a row."""
        cursor = self.cursor
        return RowPosition(
            time_s=self.clock(),
            phase=cursor.phase,
            step=cursor.step,
            global_step=cursor.global_step,
        )

    def enter_phase(self, phase: Phase) -> None:
        """Make a phase the active one."""
        cursor = self.cursor
        if cursor.phase != phase.name or phase.name not in cursor.starts:
            cursor.phase, cursor.step = phase.name, 0
            cursor.starts[phase.name] = cursor.global_step
            self.figures.step_seconds, self.figures.window = [], []
        self.record_event("PhaseStarted", f"phase {phase.name} continues from step {cursor.step}")
        self.update_status()

    def begin_epoch(self, record: EpochRecord) -> None:
        """Continue in an epoch that this controller opened; the next version is complete."""
        self.epoch, self.next_version = record.epoch, record.first_number
        parent = record.parent
        self.cursor.policy = None if parent is None else (parent.epoch, parent.number)
        self.versions.base = None
        self.compaction.begin_epoch(record)

    def record_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Report an event to the operator, the record and the log."""
        log.log(logging.WARNING if warning else logging.INFO, "%s: %s", reason, message)
        self.reports.add_event(reason, message, warning=warning)
        row = self.place().row("event", reason=reason, message=message, warning=warning)
        self.recorder.add_row(row)

    def mark_progress(self) -> None:
        """Note progress, for the watchdog."""
        self.progress_s = time.monotonic()

    def complete_step(self, result: StepResult, *, seconds: float) -> None:
        """Advance by one optimiser step, and journal it."""
        cursor, figures = self.cursor, self.figures
        cursor.step += 1
        cursor.global_step += 1
        figures.productive_seconds += seconds
        figures.step_seconds = [*figures.step_seconds, round(seconds, 4)][-KEPT_STEP_TIMES:]
        self.mark_progress()
        self.cadence.count_step(
            self.commands.checkpointing, step=cursor.step, now_s=self.progress_s
        )
        self.commands.requests.count_step(self.progress_s)
        body = journal_pb2.JournalStep(
            phase=cursor.phase,
            step=cursor.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            weight_digest=result.weight_digest,
        )
        self.book.write(journal_pb2.JournalRecord(step=body))
        status = self.reports.status
        status.loss = result.loss
        status.tokens_per_second = result.tokens / max(seconds, 1e-9)
        status.last_step_unix_ms = int(self.clock() * 1000)
        metrics.LOSS.set(result.loss)
        metrics.GRAD_NORM.set(result.grad_norm)
        metrics.TOKENS_PER_SECOND.set(status.tokens_per_second)
        metrics.STEP.set(cursor.global_step)
        self.update_status()

    def update_status(self) -> None:
        """Update the status report."""
        status, cursor, figures = self.reports.status, self.cursor, self.figures
        status.phase, status.step, status.target_step = (
            cursor.phase,
            cursor.step,
            self.phase.max_steps,
        )
        del status.phases[:]
        status.phases.extend(phase_progress(cursor, self.resolved.spec.phases))
        status.policy_version = cursor.policy[1] if cursor.policy else 0
        status.reward_ewma = figures.reward_ewma
        status.productive_seconds = figures.productive_seconds
        status.step_seconds_p99 = slow_step_s(figures.step_seconds)
        status.step_seconds_p50 = median_step_s(figures.step_seconds)
        status.observed_generation = self.commands.generation
        ledger, counts = self.book.ledger, status.rollouts
        counts.completed, counts.trained = ledger.accepted + figures.evaluated, ledger.trained
        counts.masked, counts.dropped = ledger.masked, ledger.discarded
        counts.retried = figures.retried
        if figures.eval_success is not None:
            status.eval_success = figures.eval_success
        self.throughput.write_status(status)
        status.engines, status.engine_limit = len(self.engines.rotation), self.engines.num_addressed
        self._report_problem()
        self.reports.mark_changed()

    @property
    def store_problem(self) -> str:
        """Last error of the store for a user that waits for it; empty while it works."""
        return (
            self.book.journal.store_retry.problem
            or self.store_retry.problem
            or self.upload_retry.problem
            or self.recorder.problem
        )

    def _report_problem(self) -> None:
        status = self.reports.status
        trouble = self.store_problem
        late = self.compaction.overdue_problem(self.newest_number)
        if trouble:
            status.reason, status.message = StoreError.reason, trouble
        elif late:
            status.reason, status.message = KEYFRAME_OVERDUE, late
        elif self.engines.lag_problem:
            status.reason, status.message = LAGGING, self.engines.lag_problem
        elif status.reason in {StoreError.reason, KEYFRAME_OVERDUE, LAGGING}:
            status.reason = status.message = ""

    @property
    def is_pausing(self) -> bool:
        """True if the next step boundary saves or stops: no version may be in flight then."""
        return (
            self.commands.stop_requested.is_set() or self._reason_to_save(ended=False) is not None
        )

    async def step_boundary(self, *, ended: bool = False) -> bool:
        """Handle the boundary between two steps: save if it is due; True to stop."""
        self.update_status()
        if self.commands.stop_requested.is_set():
            self.reports.set_state(run_pb2.RUN_STATE_DRAINING)
        reason = self._reason_to_save(ended=ended)
        if reason is not None and (ended or self.saver.last_step != self.cursor.global_step):
            await self.save_checkpoint(reason)
        return self.commands.stop_requested.is_set()

    def _reason_to_save(self, *, ended: bool) -> Reason | None:
        orders = self.commands
        if self.book.ledger.batches:
            return None  # batches of an earlier controller come first
        if ended:
            is_last = self.cursor.phase == self.resolved.spec.phases[-1].name
            return "Final" if is_last else "PhaseEnd"
        if orders.stop_requested.is_set():
            return orders.final_save_reason
        if orders.requests.next_request(is_due=self._is_save_due):
            return "Manual"
        return "Scheduled" if self._is_save_due else None

    @property
    def _is_save_due(self) -> bool:
        """True if a scheduled checkpoint, or one without a request, is due."""
        return self.cadence.is_due or self.commands.wants_checkpoint

    async def save_checkpoint(self, reason: Reason) -> None:
        """Write a checkpoint; a scheduled one that fails is reported and retried later.

        A requested checkpoint replaces a scheduled one, unless it fails.

        Raises:
            StoreError: the store failed, and the run may not go on without this checkpoint.
            TimeoutError: it took too long, and the run may not go on without this checkpoint.
        """
        began_s, requests = time.monotonic(), self.commands.requests
        request = requests.next_request(is_due=self._is_save_due) if reason == "Manual" else ""
        if not request:
            self._restart_cadence(began_s)
            requests.note_other_checkpoint()
        before = self.reports.status.state
        self.reports.set_state(run_pb2.RUN_STATE_CHECKPOINTING)
        try:
            async with asyncio.timeout(self.commands.checkpointing.timeout_seconds):
                found = await self.saver.save(
                    self.controller_state(),
                    reason=reason,
                    with_model=reason in {"PhaseEnd", "Final", "Manual"},
                    figures=self._checkpoint_figures(),
                    request=request,
                )
        except (StoreError, TimeoutError) as error:
            self.record_event("CheckpointFailed", str(error) or "it took too long", warning=True)
            if reason in {"PhaseEnd", "Final"}:
                raise
            if request:
                requests.mark_failed(began_s, time.monotonic())
        else:
            if request:
                self._restart_cadence(began_s)
                requests.mark_fulfilled(request)
            await self.announce_checkpoint(found)
            self.mark_progress()
            await self.recorder.write_rows()
        finally:
            self.reports.set_state(before)

    def _restart_cadence(self, began_s: float) -> None:
        self.commands.wants_checkpoint = False
        self.cadence.restart(began_s)

    async def announce_checkpoint(self, found: StoredCheckpoint) -> None:
        """Report a stored checkpoint, so that it is registered."""
        keyframe = await asyncio.to_thread(chain_keyframe, self.store, found.manifest)
        uri = f"{self.store.url}/{found.prefix.rstrip('/')}"
        self.reports.add_checkpoint(found, uri=uri, keyframe=keyframe)

    def controller_state(self) -> ControllerState:
        """State of the controller, for a checkpoint."""
        return ControllerState(
            run=self.resolved.uid,
            epoch=self.epoch,
            cursor=self.cursor.model_copy(deep=True),
            figures=self.figures.model_copy(deep=True),
            ledger=self.book.ledger.checkpoint_state(),
            sequence=self.book.journal.last_sequence,
            seeds={phase.name: phase.seed for phase in self.resolved.spec.phases},
            branch=self.branch.number,
            path=self.branch.path,
        )

    def _checkpoint_figures(self) -> dict[str, str]:
        figures = {}
        if self.book.ledger.trained:
            figures["reward"] = f"{self.figures.reward_ewma:.6g}"
        if self.figures.eval_success is not None:
            figures["evalSuccess"] = f"{self.figures.eval_success:.6g}"
        return figures

    async def run_unless_stopped(self, work: Awaitable[T]) -> T | None:
        """Await some work; None if the controller was told to stop meanwhile."""
        task = asyncio.ensure_future(work)
        halted = asyncio.ensure_future(self.commands.stop_requested.wait())
        try:
            await asyncio.wait({task, halted}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            halted.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def slow_step_s(step_seconds: list[float]) -> float:
    """99th percentile of step times."""
    if not step_seconds:
        return 0.0
    return sorted(step_seconds)[min(len(step_seconds) - 1, int(len(step_seconds) * 0.99))]


def root_cause(error: BaseException) -> BaseException:
    """First error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
