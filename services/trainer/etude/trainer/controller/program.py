"""Program of a run: start or resume, then phase after phase, with background tasks and watchdog."""

import asyncio
import logging
import time

from etude.common.api.run.phases import Phase, inherit_context
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import StoredCheckpoint
from etude.common.errors import InvalidFieldError, StoreError, UserError
from etude.common.stores import open_run_store
from etude.common.weights import VersionId, is_fenced
from etude.trainer import metrics
from etude.trainer.contents.objects import OF_EVALUATIONS
from etude.trainer.controller.admission.task_choice import curriculum_path, open_choice
from etude.trainer.controller.inputs import TaskSets
from etude.trainer.controller.phases.evaluation import Evaluator
from etude.trainer.controller.phases.feedback import FeedbackPhase
from etude.trainer.controller.phases.reinforcement import ReinforcementPhase
from etude.trainer.controller.phases.supervised import train_supervised
from etude.trainer.controller.phases.targets import passes_gate
from etude.trainer.controller.progress import RunFailedError, slow_step_s
from etude.trainer.controller.reporting.commands import dump_stacks
from etude.trainer.controller.run import Run, root_cause
from etude.trainer.export.receipts import NonFiniteWeightsError
from etude.trainer.learner.batches import RefusedUpdateError
from etude.v1 import run_pb2

log = logging.getLogger(__name__)

FIRST_STEPS = 10
FIRST_STEPS_LIMIT_S = 3_600.0
"""Silence limit until FIRST_STEPS are measured, and before the first step of this controller, which
loads and waits for engines that load."""

LEAST_LIMIT_S = 300.0
CHECKPOINT_MARGIN_S = 30.0
"""A checkpoint that takes too long is reported as such before it counts as silence."""
EVALUATION_LIMIT_S = 3_600.0
"""Silence limit of an evaluation, which may finish nothing before its last task is scored."""

WATCH_EVERY_S = 5.0

_ENDINGS = (RunFailedError, RefusedUpdateError, NonFiniteWeightsError, UserError, InvalidFieldError)
"""Errors of training that end the run for good, or until its user changes something."""


async def train(run: Run, task_sets: TaskSets, *, checkpoint: StoredCheckpoint | None) -> bool:
    """Train until the run is done; False if the controller was told to stop earlier.

    Raises:
        RunFailedError: the run cannot continue, and a restart would not help.
        FencedError: a newer controller took over.
    """
    try:
        return await _train_beside_helpers(run, task_sets, checkpoint)
    finally:
        await run.checkpoints.cancel()


async def _train_beside_helpers(
    run: Run, task_sets: TaskSets, checkpoint: StoredCheckpoint | None
) -> bool:
    async with asyncio.TaskGroup() as group:
        helpers = [
            group.create_task(run.book.journal.run(), name="journal"),
            group.create_task(run.publishing.run(), name="versions"),
            group.create_task(run.reporter.recorder.keep_writing(), name="rows"),
            group.create_task(_watchdog(run), name="watchdog"),
            group.create_task(run.publishing.run_compaction(), name="compaction"),
        ]
        try:
            is_done = await _run_phases(run, task_sets, checkpoint)
        except Exception as error:
            if isinstance(root_cause(error), _ENDINGS):
                # A checkpoint of an earlier step is still valid.
                await run.checkpoints.wait_stored()
            raise
        await run.checkpoints.wait_stored()
        await run.book.journal.wait_durable()
        await run.reporter.recorder.finish()
        for task in helpers:
            task.cancel()
    return is_done


async def _run_phases(run: Run, task_sets: TaskSets, checkpoint: StoredCheckpoint | None) -> bool:
    if not await run.commands.run_unless_stopped(_begin(run, checkpoint)):
        return False
    for phase in inherit_context(run.progress.resolved.spec.phases):
        if phase.name in run.progress.cursor.finished:
            continue
        run.enter_phase(phase)
        run.reporter.set_state(run_pb2.RUN_STATE_RUNNING)
        if not await _train_phase(run, phase, task_sets):
            await run.checkpoints.step_boundary()
            return False
        if not await passes_gate(run.checkpoints, phase):
            return False
        run.progress.cursor.finished.append(phase.name)
        if await run.checkpoints.step_boundary(ended=True):
            return run.progress.cursor.phase == run.progress.resolved.spec.phases[-1].name
    return True


async def _train_phase(run: Run, phase: Phase, task_sets: TaskSets) -> bool:
    """Train a phase to its end; False if the controller was told to stop earlier."""
    if phase.algorithm is None:
        return await train_supervised(run, phase)
    if phase.feedback is not None:
        store = open_run_store(phase.feedback.uri, run.progress.resolved.spec.storage)
        return await FeedbackPhase(run=run, phase=phase, source=phase.feedback, store=store).train()
    return await ReinforcementPhase(
        run=run,
        phase=phase,
        algorithm=phase.algorithm,
        choice=open_choice(
            task_sets.orders[phase.name],
            phase.curriculum,
            at=curriculum_path(run.progress.resolved.spec, phase),
        ),
        evaluator=Evaluator(run=run, phase=phase, tasks=dict(task_sets.evaluations)),
    ).train()


async def _begin(run: Run, checkpoint: StoredCheckpoint | None) -> bool:
    """Restore the learner, report stored checkpoints, and publish so that engines can start.

    Returns True, so that a cancelled start can be told apart.
    """
    await asyncio.to_thread(_delete_unfinished, run)
    for found in await asyncio.to_thread(_stored_checkpoints, run):
        run.commands.requests.mark_fulfilled(found.manifest.request)
        await run.checkpoints.announce_checkpoint(found)
    if checkpoint is not None:
        await run.learners.restore(checkpoint.prefix + checkpoint.manifest.state_folder)
        saver, step = run.checkpoints.saver, checkpoint.manifest.step
        saver.last_step, saver.last = step, checkpoint
        if run.progress.cursor.policy is not None:
            await run.publishing.chain.resume(VersionId(*run.progress.cursor.policy))
        run.reporter.record_event("Resumed", f"from the checkpoint of step {step}")
    # A phase of type Feedback may be within a window, of which no part is published.
    if not run.progress.phase.is_feedback:
        await run.publishing.publish()
    return True


def _delete_unfinished(run: Run) -> None:
    try:
        leftovers = manifest.list_unfinished(run.store, epoch=run.progress.epoch)
        if leftovers and not is_fenced(run.store, run.progress.epoch):
            run.store.delete(leftovers)
            log.info("%d objects of unfinished checkpoints were deleted", len(leftovers))
        # Evaluations of earlier controllers: those that are not done run again.
        rollouts = [info.key for info in run.store.list(OF_EVALUATIONS)]
        if rollouts and not is_fenced(run.store, run.progress.epoch):
            run.store.delete(rollouts)
            log.info("%d objects of earlier evaluations were deleted", len(rollouts))
    except StoreError as error:
        log.warning("leftovers of earlier controllers stay: %s", error)


def _stored_checkpoints(run: Run) -> list[StoredCheckpoint]:
    return manifest.complete_checkpoints(run.store, run=run.progress.resolved.uid)


def silence_limit_s(deadline_s: int | None, step_seconds: list[float]) -> float:
    """Longest time without progress before the watchdog alarms."""
    if deadline_s is not None:
        return float(deadline_s)
    if len(step_seconds) < FIRST_STEPS:
        return FIRST_STEPS_LIMIT_S
    return max(LEAST_LIMIT_S, 3 * slow_step_s(step_seconds))


def current_silence_limit_s(run: Run) -> float:
    """Silence limit in the current state: checkpoints and evaluations have their own."""
    match run.reporter.status.state:
        case run_pb2.RUN_STATE_CHECKPOINTING:
            least_s = run.commands.checkpointing.timeout_seconds + CHECKPOINT_MARGIN_S
        case run_pb2.RUN_STATE_EVALUATING:
            least_s = EVALUATION_LIMIT_S
        case _:
            least_s = 0.0
    if not run.reporter.status.last_step_unix_ms:
        least_s = max(least_s, FIRST_STEPS_LIMIT_S)
    deadline_s = run.commands.spec.deadlines.step_progress_seconds
    return max(least_s, silence_limit_s(deadline_s, run.progress.figures.step_seconds))


async def _watchdog(run: Run) -> None:
    """Dump stacks and report a stall when nothing progresses; the operator decides what follows."""
    alarmed_s = -1.0
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        silence_s = time.monotonic() - run.progress.progress_s
        metrics.SILENCE.labels(what="step").set(silence_s)
        metrics.LOG_DEPTH.labels(log="journal").set(run.book.journal.depth)
        run.reporter.update_status()
        if run.store_problem:
            continue  # the run waits for the store, and reports that
        if silence_s > current_silence_limit_s(run) and run.progress.progress_s != alarmed_s:
            alarmed_s = run.progress.progress_s
            dump_stacks()
            run.reporter.record_event(
                "Stalled", f"nothing was finished for {silence_s:.0f} s", warning=True
            )
