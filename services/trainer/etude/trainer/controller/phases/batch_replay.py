"""Replay of journaled batches that the weights of a checkpoint do not have."""

import itertools

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.controller.journal.ledger import StepId
from etude.trainer.controller.phases.batch_training import fetch_contents, train_batch
from etude.trainer.controller.phases.step_accounting import StepAccounting, refuse_left_batches
from etude.trainer.controller.run import Run


async def replay_batches(run: Run, accounting: StepAccounting, limits: RolloutPolicy) -> bool:
    """Train the journaled batches of a phase that the checkpoint's weights do not have.

    Checkpoints are saved meanwhile as they are between other steps, so that another death costs
    no more steps than the one before.

    Returns:
        True if the controller was asked to stop.

    Raises:
        RunFailedError: the batches are not consecutive, or too many of their rollouts are lost.
    """
    progress, batches = run.progress, run.book.ledger.batches
    own = [groups for step, groups in batches.items() if step.phase == accounting.phase]
    fetch_contents(run, itertools.chain.from_iterable(own), steps=len(own))
    while (step := StepId(accounting.phase, progress.cursor.step + 1)) in batches:
        groups = batches[step]
        result = await train_batch(run, groups, limits)
        await run.checkpoints.wait_before_step_ends()
        run.reporter.recorder.add_row(accounting.account_step(result, groups, waited_s=0.0))
        is_last = progress.cursor.step == progress.last_step
        if not is_last and await run.checkpoints.step_boundary():
            return True
    refuse_left_batches(run, accounting.phase)
    return False
