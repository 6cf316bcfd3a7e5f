"""Reporter of a run: status and events for the operator, rows for the record."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from etude.trainer.controller.progress import RunProgress
from etude.trainer.controller.reporting.recorder import RunRecorder
from etude.trainer.controller.reporting.reports import RunReports
from etude.v1 import run_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunReporter:
    """Reports of a run to the operator, the record and the log."""

    progress: RunProgress
    reports: RunReports
    recorder: RunRecorder
    write_status: Callable[[run_pb2.RunStatus], None] = lambda _status: None
    """Writes the run's current state into a status."""

    @property
    def status(self) -> run_pb2.RunStatus:
        return self.reports.status

    def update_status(self) -> None:
        self.write_status(self.reports.status)
        self.reports.mark_changed()

    def set_state(self, state: run_pb2.RunState) -> None:
        self.reports.set_state(state)

    def record_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Report an event to the operator, the record and the log."""
        log.log(logging.WARNING if warning else logging.INFO, "%s: %s", reason, message)
        self.reports.add_event(reason, message, warning=warning)
        row = self.progress.position().row("event", reason=reason, message=message, warning=warning)
        self.recorder.add_row(row)
