"""Supervised phases: continued pretraining and supervised fine-tuning."""

import time

from etude.common.api.run.phases import Phase
from etude.trainer.controller.phases.targets import record_measurement
from etude.trainer.controller.reporting.rows import step_row
from etude.trainer.controller.run import Run


async def train_supervised(run: Run, phase: Phase) -> bool:
    """Train the phase to its end; False if the controller was told to stop earlier."""
    await run.learners.start_phase(phase, run.cursor.step)
    while run.cursor.step < run.last_step:
        started = time.monotonic()
        result = await run.learners.supervised_step(run.cursor.step)
        seconds = time.monotonic() - started
        run.complete_step(result, seconds=seconds)
        record_measurement(run, {"Loss": result.loss})
        run.recorder.add_row(step_row(run.place(), result, seconds=seconds))
        if run.cursor.step < run.last_step and await run.step_boundary():
            return False
    return True
