"""Supervised phases: continued pretraining and supervised fine-tuning."""

import time

from etude.common.api.run.phases import Phase
from etude.trainer.controller.phases.targets import record_measurement
from etude.trainer.controller.reporting.rows import step_row
from etude.trainer.controller.run import Run


async def train_supervised(run: Run, phase: Phase) -> bool:
    """Train the phase to its end; False if the controller was told to stop earlier."""
    progress = run.progress
    await run.learners.start_phase(phase, progress.cursor.step)
    while progress.cursor.step < progress.last_step:
        started = time.monotonic()
        result = await run.learners.supervised_step(progress.cursor.step)
        seconds = time.monotonic() - started
        run.complete_step(result, seconds=seconds)
        record_measurement(run.reporter, {"Loss": result.loss})
        run.reporter.recorder.add_row(step_row(progress.position(), result, seconds=seconds))
        if progress.cursor.step < progress.last_step and await run.checkpoints.step_boundary():
            return False
    return True
