"""Feedback phase: wait for a window of production rollouts, train it in few steps, publish once."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.common.api.meta import number as parse_number
from etude.common.api.run.phases import FeedbackSource, Phase
from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.feedback.windows import WindowManifest
from etude.trainer.contents.rollout_checks import check_rollout
from etude.trainer.controller.admission.dropping import QuarantineFilter, drop_rollout
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.window_groups import WindowGroups
from etude.trainer.controller.admission.windows import (
    Contents,
    ReadRollouts,
    Refusal,
    WindowReader,
    build_window_batch,
    check_size,
    find_refusal,
)
from etude.trainer.controller.journal.ledger import StepId
from etude.trainer.controller.phases.guards import MismatchGuard
from etude.trainer.controller.phases.step_accounting import refuse_left_batches
from etude.trainer.controller.phases.window_accounting import WindowAccounting, WindowFigures
from etude.trainer.controller.progress import RunFailedError
from etude.trainer.controller.run import Run
from etude.trainer.learner.batches import PolicyBatch
from etude.v1 import journal_pb2, rollout_pb2

POLL_S = 1.0
"""One listing: little beside a learner that waits, and users who wait for what it learns."""
SAVE_AGAIN_S = 60.0
"""Pause after a checkpoint of a window that could not be stored."""


class DamagedWindowError(RunFailedError):
    """A window of which the weights have a part can no longer be read."""

    reason = "DamagedWindow"


@dataclass(slots=True, kw_only=True)
class FeedbackPhase:
    """Trains windows in the order of their numbers, each at most once in a run."""

    run: Run
    phase: Phase
    source: FeedbackSource
    store: Store
    """Of the feedback service."""
    filter: QuarantineFilter = field(init=False)
    _groups: WindowGroups = field(init=False)
    _reader: WindowReader = field(init=False)
    _accounting: WindowAccounting = field(init=False)
    _guard: MismatchGuard = field(init=False)
    _saved_s: float = 0.0
    """Time of the newest attempt to save a window's checkpoint, of time.monotonic()."""

    def __post_init__(self) -> None:
        self.filter = self.run.quarantine_filter()
        self._groups = WindowGroups(
            book=self.run.book, uri=self.source.uri, phase=self.phase.name, seed=self.phase.seed
        )
        self._reader = WindowReader(self.store, self.run.publishing.store_retry)
        self._accounting = WindowAccounting(self.run, self.phase.name)
        self._guard = MismatchGuard(self.run.progress)

    async def train(self) -> bool:
        """Train the phase to its end; False if the controller was told to stop earlier.

        Raises:
            RunFailedError: engine and learner disagree, or the journal and the store do.
            RefusedUpdateError: a step failed; nothing was changed by it.
        """
        progress = self.run.progress
        await self.run.learners.start_phase(self.phase, progress.cursor.step)
        await self._replay_steps()
        # What an earlier controller began is finished first: a part of a window is never published.
        last = self._groups.last
        if last and not await self._train_window(last):
            return False
        if await self._publish():
            return False
        while progress.cursor.step < progress.last_step:
            number = await self._wait_for_window()
            if number is None or not await self._train_window(number) or await self._publish():
                return False
        return True

    async def _publish(self) -> bool:
        """Publish the weights and save a checkpoint, unless both are there; True to stop."""
        run = self.run
        await run.publishing.publish()
        run.publishing.record_version()
        if run.progress.cursor.step == run.progress.last_step:
            return False  # the end of the phase saves one
        self._saved_s = time.monotonic()
        return await run.checkpoints.step_boundary(of_window=True)

    async def _wait_for_window(self) -> int | None:
        """Wait for the next window; None to stop."""
        run = self.run
        while not run.commands.stop_requested.is_set():
            last = self._groups.last
            found = await run.commands.run_unless_stopped(self._reader.find_next(last))
            if found is not None:
                self._accounting.end_wait()
                return found
            run.progress.mark_progress()
            self._accounting.report_wait(self.source.uri, last)
            is_saved = run.checkpoints.saver.last_step == run.progress.cursor.global_step
            if not is_saved and time.monotonic() - self._saved_s > SAVE_AGAIN_S:
                await self._publish()
            await run.commands.run_unless_stopped(asyncio.sleep(POLL_S))
        return None

    async def _train_window(self, number: int) -> bool:
        """Train or drop a window, or finish it; False if the controller was told to stop.

        Raises:
            DamagedWindowError: it is damaged, and a part of it is trained.
        """
        if self._groups.is_done(number):
            return True
        is_begun = self._groups.is_begun(number)
        try:
            manifest = await self._reader.read_window(number)
        except CorruptError as error:
            if is_begun:
                raise DamagedWindowError(str(error)) from error
            damaged = Refusal("damaged_window", str(error), is_counted=False)
            await self._refuse(number, None, damaged)
            return True
        refusal = None if is_begun else self._find_refusal(manifest)
        if refusal is not None:
            await self._refuse(number, manifest, refusal)
            return True
        groups = await self._groups.admit(manifest, steps=self.source.steps_per_window)
        age_s = self.run.progress.clock() - manifest.closed_ms / 1000
        figures = WindowFigures(manifest, age_s)
        contents = await self._read_groups(manifest, groups, figures)
        refusal = None if is_begun else check_size(len(contents), self.source)
        if refusal is not None:
            await self._refuse(number, manifest, refusal)
            return True
        return await self._train_groups(groups, contents, figures)

    def _find_refusal(self, manifest: WindowManifest) -> Refusal | None:
        progress = self.run.progress
        return find_refusal(
            manifest,
            self.source,
            run_uid=progress.resolved.uid,
            versions=self.run.book.ledger.versions,
            now_s=progress.clock(),
        )

    async def _refuse(self, number: int, manifest: WindowManifest | None, refusal: Refusal) -> None:
        """Admit a window and drop it, so that each of its rollouts is accounted for."""
        if manifest is None or not refusal.is_counted:
            self._groups.admit_uncounted(number)
        else:
            await self._groups.admit(manifest, steps=1)
        self._groups.drop(self._groups.live(number), refusal.reason)
        self._accounting.account_refusal(number, refusal, manifest)

    async def _read_groups(
        self, manifest: WindowManifest, groups: Sequence[RolloutGroup], figures: WindowFigures
    ) -> Contents:
        """Read the rollouts of slices, and drop those that cannot be trained."""
        await self.filter.refresh()
        owners = {index: group for group in groups for index in group.valid_indices()}
        read = await self._read(manifest, list(owners))
        marked: dict[int, str] = {
            index: mark
            for index, rollout in read.contents.items()
            if (mark := self.filter.marks.drop_reason(journal_pb2.JournalRollout(rollout=rollout)))
            is not None
        }
        for index, reason in sorted((dict(read.masked) | marked).items()):
            figures.masked[reason] += 1
            name = manifest.rollouts[index].rollout
            drop_rollout(self.run.book, owners[index], name, reason)
        return {index: each for index, each in read.contents.items() if index not in marked}

    async def _read(self, manifest: WindowManifest, indices: Sequence[int]) -> ReadRollouts:
        chat = self.run.dispatcher.chat
        assert chat is not None  # noqa: S101 - loaded for every run with such a phase
        # The version of the window alone: what another one sampled has no part in it.
        position_of = {manifest.policy: 0}.get

        def check(rollout: rollout_pb2.Rollout) -> None:
            check_rollout(
                rollout,
                vocab_size=chat.vocab_size,
                max_tokens=self.source.max_tokens,
                position_of=position_of,
            )

        return await self._reader.read_rollouts(manifest, indices, check)

    async def _train_groups(
        self, groups: Sequence[RolloutGroup], contents: Contents, figures: WindowFigures
    ) -> bool:
        """Train slices one by one; False if the controller was told to stop."""
        learners = self.run.learners
        batch: PolicyBatch | None = None
        for place, group in enumerate(groups):
            if self.run.commands.stop_requested.is_set():
                return False
            batch = self._build_batch(figures.manifest, contents, group)
            figures.divergence = await learners.measure_divergence(batch)
            figures.ended_by = self._end_of_window(figures.divergence)
            if figures.ended_by:
                self._groups.drop(groups[place:], figures.ended_by)
                break
            await self._train_step(group, batch, figures)
        if batch is not None and not figures.ended_by:
            figures.divergence = await learners.measure_divergence(batch)
        self._accounting.account_window(figures)
        return True

    def _end_of_window(self, divergence: float) -> str:
        """Reason to drop the rest of a window; empty if there is none."""
        progress = self.run.progress
        if progress.cursor.step == progress.last_step:
            return "surplus"
        return "" if divergence < parse_number(self.source.kl_budget) else "kl_budget"

    def _build_batch(
        self, manifest: WindowManifest, contents: Contents, group: RolloutGroup
    ) -> PolicyBatch:
        versions, step = self.run.book.ledger.versions, self.run.progress.cursor.global_step
        current = {version for version, published in versions.items() if published == step}
        indices = [index for index in group.valid_indices() if index in contents]
        return build_window_batch(manifest, contents, indices, current=current)

    async def _train_step(
        self, group: RolloutGroup, batch: PolicyBatch, figures: WindowFigures
    ) -> None:
        run = self.run
        body = journal_pb2.JournalBatch(
            phase=self.phase.name, step=run.progress.cursor.step + 1, group_ids=[group.group_id]
        )
        sequence = run.book.write(journal_pb2.JournalRecord(batch=body))
        # The batch and its rollouts are durable before the learner sees them.
        await run.book.journal.wait_durable(sequence)
        run.publishing.batch_sequence = sequence
        result = await run.learners.policy_step(batch)
        self._guard.check(result)
        self._accounting.account_step(result, batch, figures)

    async def _replay_steps(self) -> None:
        """Replay the steps of the journal that were trained after the checkpoint.

        Raises:
            RunFailedError: they are not consecutive, or their window cannot be read.
        """
        run = self.run
        while (
            step := StepId(self.phase.name, run.progress.cursor.step + 1)
        ) in run.book.ledger.batches:
            [group] = run.book.ledger.batches[step]
            await self._replay_step(group)
        refuse_left_batches(run, self.phase.name)

    async def _replay_step(self, group: RolloutGroup) -> None:
        """Replay a step without rollouts that were erased since.

        Raises:
            DamagedWindowError: its window cannot be read.
        """
        run = self.run
        try:
            manifest = await self._reader.read_window(group.position)
        except CorruptError as error:
            raise DamagedWindowError(str(error)) from error
        indices = group.valid_indices()
        read = await self._read(manifest, indices)
        for index, reason in sorted(read.masked.items()):
            drop_rollout(run.book, group, manifest.rollouts[index].rollout, reason)
        if read.masked:
            reasons = ", ".join(sorted(set(read.masked.values())))
            lost = f"{len(read.masked)} of {len(indices)} rollouts of {group.group_id}"
            message = f"{lost} cannot be trained again: {reasons}"
            run.reporter.record_event("WindowReplayed", message, warning=True)
        batch = self._build_batch(manifest, read.contents, group)
        result = await run.learners.policy_step(batch)
        figures = WindowFigures(manifest, run.progress.clock() - manifest.closed_ms / 1000)
        self._accounting.account_step(result, batch, figures)
