"""Supervised phases: continued pretraining and supervised fine-tuning."""

import time

from etude.common.api.run.phases import Phase
from etude.trainer import metrics
from etude.trainer.controller.phases.targets import record_measurement
from etude.trainer.controller.reporting.rows import held_out_row, step_row
from etude.trainer.controller.run import Run


async def train_supervised(run: Run, phase: Phase) -> bool:
    """Train the phase to its end; False if the controller was told to stop earlier."""
    progress = run.progress
    await run.learners.start_phase(phase, progress.cursor.step, progress.cursor.data)
    if progress.cursor.step == 0:
        await measure_held_out(run, phase)
    while progress.cursor.step < progress.last_step:
        started = time.monotonic()
        result = await run.learners.supervised_step(progress.cursor.step)
        seconds = time.monotonic() - started
        await run.checkpoints.wait_before_step_ends()
        run.complete_step(result, seconds=seconds)
        record_measurement(run.reporter, {"Loss": result.loss})
        run.reporter.recorder.add_row(step_row(progress.position(), result, seconds=seconds))
        await measure_held_out(run, phase)
        if progress.cursor.step < progress.last_step and await run.checkpoints.step_boundary():
            return False
    return True


async def measure_held_out(run: Run, phase: Phase) -> None:
    """Measure and record the held-out loss when it is due, and at the end of the phase."""
    step = run.progress.cursor.step
    if phase.validation is None:
        return
    if step % phase.validation.every_steps and step < run.progress.last_step:
        return
    losses = await run.learners.held_out_losses()
    for name, loss in losses.items():
        metrics.HELD_OUT_LOSS.labels(dataset=name).set(loss)
    run.reporter.recorder.add_row(held_out_row(run.progress.position(), losses))
