"""Checkpoint manager: decides at step boundaries whether to save, and reports what was saved.

Between two steps the learner's state is copied to memory. Of a scheduled checkpoint, everything
after that runs during the next steps; it is finished before the next checkpoint begins.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.checkpoints.manifest import Reason, StoredCheckpoint
from etude.common.errors import StoreError
from etude.trainer.controller.checkpoints.cadence import CheckpointCadence, is_due_by_steps
from etude.trainer.controller.checkpoints.lineage import Branch
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.checkpoints.saver import (
    CheckpointSaver,
    EpochClosedError,
    UnstoredCheckpoint,
    chain_keyframe,
)
from etude.trainer.controller.checkpoints.state import ControllerState
from etude.trainer.controller.progress import RunProgress
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.v1 import run_pb2

READABLE_S = 5.0
"""Longest wait of a stored checkpoint for the readable rollouts of its steps."""


class _Attempt(NamedTuple):
    """One attempt at a checkpoint."""

    reason: Reason
    request: str
    """UID of the object that asked for it; empty if none did."""
    began_s: float
    """Of time.monotonic()."""
    deadline_s: float
    """Of the event loop's time."""


@dataclass(slots=True, kw_only=True)
class CheckpointManager:
    """Checkpoints of a run: scheduled, on demand, and at the end of phases."""

    progress: RunProgress
    reporter: RunReporter
    commands: RunCommands
    book: JournaledLedger
    saver: CheckpointSaver
    branch: Branch = field(default_factory=Branch)
    """The run's branch of checkpoints."""
    cadence: CheckpointCadence = field(default_factory=CheckpointCadence)
    _saving: asyncio.Task[None] | None = None
    """Stores the newest checkpoint, during the steps."""

    @property
    def is_pausing(self) -> bool:
        """True if the next step boundary saves or stops: no version may be in flight then."""
        is_stopping = self.commands.stop_requested.is_set()
        return is_stopping or self._reason_to_save(ended=False) is not None

    async def wait_before_step_ends(self) -> None:
        """Wait, before a trained step is journaled, for the checkpoint that is being stored.

        Only if the step has a checkpoint of its own by everySteps: with N steps between two, a
        death costs 2 N - 1 journaled steps at most, and one where each step has a checkpoint.

        Raises:
            FencedError: a newer controller took over.
        """
        if is_due_by_steps(self.commands.checkpointing, step=self.progress.cursor.step + 1):
            await self.wait_stored()

    def count_step(self) -> None:
        """Count a step, after the run's progress was advanced by it."""
        now_s, step = self.progress.progress_s, self.progress.cursor.step
        self.cadence.count_step(self.commands.checkpointing, step=step, now_s=now_s)
        self.commands.requests.count_step(now_s)

    async def step_boundary(self, *, ended: bool = False, of_window: bool = False) -> bool:
        """Handle the boundary between two steps: save if it is due; True to stop.

        Args:
            ended: True at the end of a phase.
            of_window: True where a window of production rollouts ends: what was trained from it
                may be released, so that its state is saved with the model.
        """
        self.reporter.update_status()
        if self.commands.stop_requested.is_set():
            self.reporter.set_state(run_pb2.RUN_STATE_DRAINING)
        reason = self._reason_to_save(ended=ended)
        if of_window and reason != "Manual":
            reason = "Window"
        if reason is not None or (self._saving is not None and self._saving.done()):
            await self.wait_stored()
        is_new = self.saver.last_step != self.progress.cursor.global_step
        if reason is not None and (ended or is_new):
            await self.save_checkpoint(reason)
        return self.commands.stop_requested.is_set()

    def _reason_to_save(self, *, ended: bool) -> Reason | None:
        commands = self.commands
        if ended:
            is_last = self.progress.cursor.phase == self.progress.resolved.spec.phases[-1].name
            return "Final" if is_last else "PhaseEnd"
        if commands.stop_requested.is_set():
            return commands.final_save_reason
        if commands.requests.next_request(is_due=self._is_save_due):
            return "Manual"
        return "Scheduled" if self._is_save_due else None

    @property
    def _is_save_due(self) -> bool:
        """True if a scheduled checkpoint, or one without a request, is due."""
        return self.cadence.is_due or self.commands.wants_checkpoint

    async def save_checkpoint(self, reason: Reason) -> None:
        """Write a checkpoint; a scheduled one is stored during the next steps.

        A scheduled one that fails is reported and retried later. A requested checkpoint replaces a
        scheduled one, unless it fails. The one before is stored first.

        Raises:
            StoreError: the store failed, and the run may not go on without this checkpoint.
            TimeoutError: it took too long, and the run may not go on without this checkpoint.
        """
        await self.wait_stored()
        attempt = self._new_attempt(reason)
        before = self.reporter.status.state
        self.reporter.set_state(run_pb2.RUN_STATE_CHECKPOINTING)
        try:
            async with self._report_failure(attempt), asyncio.timeout_at(attempt.deadline_s):
                checkpoint = await self.saver.begin(
                    self.controller_state(),
                    reason=reason,
                    with_model=reason in {"PhaseEnd", "Final", "Manual", "Window"},
                    figures=self._checkpoint_figures(),
                    request=attempt.request,
                )
                work = self._save(checkpoint, attempt)
                self._saving = asyncio.create_task(work, name=f"checkpoint-{checkpoint.place.step}")
            if reason != "Scheduled":
                await self.wait_stored()
        finally:
            self.reporter.set_state(before)

    def _new_attempt(self, reason: Reason) -> "_Attempt":
        began_s, requests = time.monotonic(), self.commands.requests
        request = requests.next_request(is_due=self._is_save_due) if reason == "Manual" else ""
        if not request:
            self._restart_cadence(began_s)
            requests.note_other_checkpoint()
        deadline_s = asyncio.get_running_loop().time() + self.commands.checkpointing.timeout_seconds
        if reason in {"Suspend", "Failure"}:
            # The stop has one time-out, also if another checkpoint had to be stored before.
            deadline_s -= began_s - self.commands.stop_requested_s
        return _Attempt(reason, request, began_s, deadline_s)

    async def _save(self, checkpoint: UnstoredCheckpoint, attempt: "_Attempt") -> None:
        stored = None
        async with self._report_failure(attempt):
            async with asyncio.timeout_at(attempt.deadline_s):
                objects = await self.saver.write_objects(checkpoint)
            # A successor trains, and writes, the steps behind the checkpoint alone.
            await self.reporter.recorder.wait_rollouts(READABLE_S)
            # Past the deadline, too: a manifest whose write was given up could appear later.
            stored = await self.saver.publish(checkpoint, objects)
        if stored is None:
            return
        if attempt.request:
            self._restart_cadence(attempt.began_s)
            self.commands.requests.mark_fulfilled(attempt.request)
        await self.announce_checkpoint(stored)
        self.progress.mark_progress()
        await self.reporter.recorder.write_rows()
        await self.saver.delete_leftovers(stored)

    @contextlib.asynccontextmanager
    async def _report_failure(self, attempt: "_Attempt") -> AsyncIterator[None]:
        """Report a failure of the block.

        Raises:
            EpochClosedError: another epoch was opened, and the run may not go on without it.
            StoreError: the store failed, and the run may not go on without it.
            TimeoutError: it took too long, and the run may not go on without it.
        """
        try:
            yield
        except (StoreError, TimeoutError, EpochClosedError) as error:
            message = str(error) or "it took too long"
            self.reporter.record_event("CheckpointFailed", message, warning=True)
            if attempt.reason in {"PhaseEnd", "Final"}:
                raise
            if attempt.request:
                self.commands.requests.mark_failed(attempt.began_s, time.monotonic())

    async def wait_stored(self) -> None:
        """Wait until no checkpoint is being stored.

        Raises:
            FencedError: a newer controller took over.
            StoreError: the store failed, and the run may not go on without this checkpoint.
            TimeoutError: it took too long, and the run may not go on without this checkpoint.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        before = self.reporter.status.state
        # A wait for the store is not a run that makes no progress.
        self.reporter.set_state(run_pb2.RUN_STATE_CHECKPOINTING)
        try:
            await saving
        finally:
            self.reporter.set_state(before)

    async def cancel(self) -> None:
        """Give up a checkpoint that is being stored."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)

    def _restart_cadence(self, began_s: float) -> None:
        self.commands.wants_checkpoint = False
        self.cadence.restart(began_s)

    async def announce_checkpoint(self, stored: StoredCheckpoint) -> None:
        """Report a stored checkpoint, so that it is registered."""
        store = self.saver.store
        keyframe = await asyncio.to_thread(chain_keyframe, store, stored.manifest)
        uri = f"{store.url}/{stored.prefix.rstrip('/')}"
        self.reporter.reports.add_checkpoint(stored, uri=uri, keyframe=keyframe)

    def controller_state(self) -> ControllerState:
        progress, spec = self.progress, self.progress.resolved.spec
        return ControllerState(
            run=progress.resolved.uid,
            epoch=progress.epoch,
            cursor=progress.cursor.model_copy(deep=True),
            figures=progress.figures.model_copy(deep=True),
            ledger=self.book.ledger.checkpoint_state(),
            sequence=self.book.journal.last_sequence,
            seeds={phase.name: phase.seed for phase in spec.phases},
            added_tokens=spec.model.add_tokens,
            branch=self.branch.number,
            path=self.branch.path,
        )

    def _checkpoint_figures(self) -> dict[str, str]:
        figures = {}
        if self.book.ledger.trained:
            figures["reward"] = f"{self.progress.figures.reward_ewma:.6g}"
        if self.progress.figures.eval_success is not None:
            figures["evalSuccess"] = f"{self.progress.figures.eval_success:.6g}"
        return figures
