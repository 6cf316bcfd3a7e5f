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
from etude.trainer.controller.admission.plans import Planner
from etude.trainer.controller.checkpoints.cadence import Cadence
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.checkpoints.recovery import Book
from etude.trainer.controller.checkpoints.saver import Saver, keyframe_of
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, Figures
from etude.trainer.controller.publishing.compaction import KEYFRAME_OVERDUE, Upkeep
from etude.trainer.controller.publishing.engines import LAGGING, Engines, VersionRefusedError
from etude.trainer.controller.publishing.in_flight import InFlight
from etude.trainer.controller.publishing.versions import BaseLostError, Encoded, Versions
from etude.trainer.controller.reporting.commands import Orders
from etude.trainer.controller.reporting.progress import progress, usual_step_s
from etude.trainer.controller.reporting.recorder import Recording
from etude.trainer.controller.reporting.reports import Reports
from etude.trainer.controller.reporting.rows import Place, Row
from etude.trainer.controller.reporting.throughput import Throughput
from etude.trainer.controller.store_retry import Patience
from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.protocol import Learners
from etude.trainer.rollouts.protocol import Rollouts
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
    book: Book
    cursor: Cursor
    figures: Figures
    next_version: int
    learners: Learners
    rollouts: Rollouts
    engines: Engines
    saver: Saver
    versions: Versions
    upkeep: Upkeep
    reports: Reports
    orders: Orders
    recording: Recording
    chat: ChatFormat
    branch: Branch = field(default_factory=Branch)
    """The run's branch of checkpoints."""
    planner: Planner = field(default_factory=Planner)
    clock: Callable[[], float] = time.time
    moved_s: float = field(default_factory=time.monotonic)
    """Time of the last progress, for the watchdog."""
    patience: Patience = field(default_factory=Patience)
    """Retries of writes that a step waits for."""
    uploading: Patience = field(default_factory=Patience)
    """Retries of uploads, which run during the steps."""
    cadence: Cadence = field(default_factory=Cadence)
    throughput: Throughput = field(default_factory=Throughput)
    in_flight: InFlight[Encoded] = field(
        default_factory=lambda: InFlight((VersionRefusedError, BaseLostError))
    )
    batched: int = 0
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

    def place(self) -> Place:
        """Current position, for a row."""
        cursor = self.cursor
        return Place(
            time_s=self.clock(),
            phase=cursor.phase,
            step=cursor.step,
            global_step=cursor.global_step,
        )

    def enter(self, phase: Phase) -> None:
        """Make a phase the active one."""
        cursor = self.cursor
        if cursor.phase != phase.name or phase.name not in cursor.starts:
            cursor.phase, cursor.step = phase.name, 0
            cursor.starts[phase.name] = cursor.global_step
            self.figures.step_seconds, self.figures.window = [], []
        self.tell("PhaseStarted", f"phase {phase.name} continues from step {cursor.step}")
        self.report()

    def begin_epoch(self, record: EpochRecord) -> None:
        """Continue in an epoch that this controller opened; the next version is complete."""
        self.epoch, self.next_version = record.epoch, record.first_number
        parent = record.parent
        self.cursor.policy = None if parent is None else (parent.epoch, parent.number)
        self.versions.base = None
        self.upkeep.begin_epoch(record)

    def tell(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Report an event to the operator, the record and the log."""
        log.log(logging.WARNING if warning else logging.INFO, "%s: %s", reason, message)
        self.reports.event(reason, message, warning=warning)
        row = self.place().row("event", reason=reason, message=message, warning=warning)
        self.recording.note(row)

    def moved(self) -> None:
        """Note progress, for the watchdog."""
        self.moved_s = time.monotonic()

    def stepped(self, result: StepResult, *, seconds: float) -> None:
        """Advance by one optimiser step, and journal it."""
        cursor, figures = self.cursor, self.figures
        cursor.step += 1
        cursor.global_step += 1
        figures.productive_seconds += seconds
        figures.step_seconds = [*figures.step_seconds, round(seconds, 4)][-KEPT_STEP_TIMES:]
        self.moved()
        self.cadence.stepped(self.orders.checkpointing, step=cursor.step, now_s=self.moved_s)
        self.orders.requests.stepped(self.moved_s)
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
        self.report()

    def report(self) -> None:
        """Update the status report."""
        status, cursor, figures = self.reports.status, self.cursor, self.figures
        status.phase, status.step, status.target_step = (
            cursor.phase,
            cursor.step,
            self.phase.max_steps,
        )
        del status.phases[:]
        status.phases.extend(progress(cursor, self.resolved.spec.phases))
        status.policy_version = cursor.policy[1] if cursor.policy else 0
        status.reward_ewma = figures.reward_ewma
        status.productive_seconds = figures.productive_seconds
        status.step_seconds_p99 = slow_step_s(figures.step_seconds)
        status.step_seconds_p50 = usual_step_s(figures.step_seconds)
        status.observed_generation = self.orders.generation
        ledger, counts = self.book.ledger, status.rollouts
        counts.completed, counts.trained = ledger.accepted + figures.evaluated, ledger.trained
        counts.masked, counts.dropped = ledger.masked, ledger.discarded
        counts.retried = figures.retried
        if figures.eval_success is not None:
            status.eval_success = figures.eval_success
        self.throughput.tell(status)
        status.engines, status.engine_limit = len(self.engines.rotation), self.engines.relied_on
        self._report_trouble()
        self.reports.touch()

    @property
    def storage_trouble(self) -> str:
        """Last error of the store for a user that waits for it; empty while it works."""
        return (
            self.book.journal.patience.trouble
            or self.patience.trouble
            or self.uploading.trouble
            or self.recording.trouble
        )

    def _report_trouble(self) -> None:
        status = self.reports.status
        trouble = self.storage_trouble
        late = self.upkeep.trouble(self.newest_number)
        if trouble:
            status.reason, status.message = StoreError.reason, trouble
        elif late:
            status.reason, status.message = KEYFRAME_OVERDUE, late
        elif self.engines.trouble:
            status.reason, status.message = LAGGING, self.engines.trouble
        elif status.reason in {StoreError.reason, KEYFRAME_OVERDUE, LAGGING}:
            status.reason = status.message = ""

    @property
    def is_pausing(self) -> bool:
        """True if the next step boundary saves or stops: no version may be in flight then."""
        return self.orders.halting.is_set() or self._reason_to_save(ended=False) is not None

    async def boundary(self, *, ended: bool = False) -> bool:
        """Handle the boundary between two steps: save if it is due; True to stop."""
        self.report()
        if self.orders.halting.is_set():
            self.reports.state(run_pb2.RUN_STATE_DRAINING)
        reason = self._reason_to_save(ended=ended)
        if reason is not None and (ended or self.saver.last_step != self.cursor.global_step):
            await self.save(reason)
        return self.orders.halting.is_set()

    def _reason_to_save(self, *, ended: bool) -> Reason | None:
        orders = self.orders
        if self.book.ledger.batches:
            return None  # batches of an earlier controller come first
        if ended:
            is_last = self.cursor.phase == self.resolved.spec.phases[-1].name
            return "Final" if is_last else "PhaseEnd"
        if orders.halting.is_set():
            return orders.last_save
        if orders.requests.turn(is_due=self._is_save_due):
            return "Manual"
        return "Scheduled" if self._is_save_due else None

    @property
    def _is_save_due(self) -> bool:
        """True if a scheduled checkpoint, or one without a request, is due."""
        return self.cadence.is_due or self.orders.wants_checkpoint

    async def save(self, reason: Reason) -> None:
        """Write a checkpoint; a scheduled one that fails is reported and retried later.

        A requested checkpoint replaces a scheduled one, unless it fails.

        Raises:
            StoreError: the store failed, and the run may not go on without this checkpoint.
            TimeoutError: it took too long, and the run may not go on without this checkpoint.
        """
        began_s, requests = time.monotonic(), self.orders.requests
        request = requests.turn(is_due=self._is_save_due) if reason == "Manual" else ""
        if not request:
            self._tried(began_s)
            requests.yielded()
        before = self.reports.status.state
        self.reports.state(run_pb2.RUN_STATE_CHECKPOINTING)
        try:
            async with asyncio.timeout(self.orders.checkpointing.timeout_seconds):
                found = await self.saver.save(
                    self.state(),
                    reason=reason,
                    with_model=reason in {"PhaseEnd", "Final", "Manual"},
                    figures=self._checkpoint_figures(),
                    request=request,
                )
        except (StoreError, TimeoutError) as error:
            self.tell("CheckpointFailed", str(error) or "it took too long", warning=True)
            if reason in {"PhaseEnd", "Final"}:
                raise
            if request:
                requests.failed(began_s, time.monotonic())
        else:
            if request:
                self._tried(began_s)
                requests.fulfilled(request)
            await self.announce(found)
            self.moved()
            await self.recording.write_rows()
        finally:
            self.reports.state(before)

    def _tried(self, began_s: float) -> None:
        self.orders.wants_checkpoint = False
        self.cadence.tried(began_s)

    async def announce(self, found: StoredCheckpoint) -> None:
        """Report a stored checkpoint, so that it is registered."""
        keyframe = await asyncio.to_thread(keyframe_of, self.store, found.manifest)
        uri = f"{self.store.url}/{found.prefix.rstrip('/')}"
        self.reports.checkpoint(found, uri=uri, keyframe=keyframe)

    def state(self) -> ControllerState:
        """State of the controller, for a checkpoint."""
        return ControllerState(
            run=self.resolved.uid,
            epoch=self.epoch,
            cursor=self.cursor.model_copy(deep=True),
            figures=self.figures.model_copy(deep=True),
            ledger=self.book.ledger.state(),
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

    async def unless_halted(self, work: Awaitable[T]) -> T | None:
        """Await some work; None if the controller was told to stop meanwhile."""
        task = asyncio.ensure_future(work)
        halted = asyncio.ensure_future(self.orders.halting.wait())
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
