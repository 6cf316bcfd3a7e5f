"""What becomes of a run that could not go on."""

import logging

from etude.common.errors import EtudeError, FencedError, InvalidFieldError, UserError
from etude.trainer.batches import NonFiniteLossError
from etude.trainer.controller.run import Run, RunFailedError
from etude.trainer.ending import exit_code
from etude.trainer.receipts import NonFiniteWeightsError
from etude.v1 import run_pb2

log = logging.getLogger(__name__)

_FINAL = (RunFailedError, NonFiniteLossError, NonFiniteWeightsError, InvalidFieldError)
"""What a restart of this process would only repeat."""


def give_up(run: Run, error: BaseException) -> int:
    """Report the end of a run that could not go on; returns the exit code."""
    log.error("the run stops", exc_info=error)
    status = run.reports.status
    status.reason = error.reason if isinstance(error, EtudeError) else type(error).__name__
    status.message = str(error)[:2048]
    run.tell(status.reason, status.message, warning=True)
    run.recording.write_rows_now()
    if isinstance(error, UserError):
        run.reports.state(run_pb2.RUN_STATE_FAILED)
        return 78
    if isinstance(error, FencedError):
        # The run goes on elsewhere: this process must neither fail it nor come back to fight.
        run.reports.state(run_pb2.RUN_STATE_DRAINING)
        return 0
    if isinstance(error, _FINAL):
        run.reports.state(run_pb2.RUN_STATE_FAILED)
        return 0
    run.reports.touch()
    # What trains waits for its store by itself. What fails nevertheless, as the checkpoint that
    # ends a phase, is done again by the next process and may fail for ever: that counts. Where
    # the store is away altogether, the next one finds that out as it loads, and is not counted.
    return exit_code(error) if status.state == run_pb2.RUN_STATE_LOADING else 1
