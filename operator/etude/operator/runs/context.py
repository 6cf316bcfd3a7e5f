"""Context of a run's status conditions."""

from dataclasses import dataclass

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import RLRunStatus
from etude.operator.actions import Moment
from etude.operator.conditions import Fact, holds
from etude.operator.runs.capacity.kueue import Quota
from etude.operator.runs.lifecycle import intents
from etude.operator.runs.observe import Seen
from etude.v1 import run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Input of the status conditions of a run."""

    run: RLRun
    """With its new status, conditions still as they were."""
    seen: Seen
    now: Moment
    problem: Fact | None
    """Why the run is not accepted."""
    is_running: bool
    """Whether the run should hold pods."""
    quota: Quota | None = None
    """What the queue says of a run that should hold pods; None of any other."""
    ending: Fact | None = None
    """Complete or Failed, once the run is over."""

    @property
    def status(self) -> RLRunStatus:
        """The new status so far."""
        return self.run.status

    @property
    def report(self) -> run_pb2.RunStatus | None:
        """The newest report, if its controller is still there."""
        return self.seen.report.status if self.seen.report.is_connected else None

    @property
    def samples_now(self) -> bool:
        """The active phase needs engines, environments and rewards."""
        active = self.status.active_phase or self.run.spec.phases[0].name
        return any(p.is_rl for p in self.run.spec.phases if p.name == active)

    @property
    def has_connection(self) -> bool:
        """The controller reports, or did so within SILENCE_LIMIT_S."""
        return self.report is not None or (self.seen.report.status is not None and self._lately)

    @property
    def is_awaited(self) -> bool:
        """This operator has no report yet of a run that was Ready under the last operator.

        A new operator connects to every run when it starts. Until a report arrives, conditions that
        need one keep the value that the last operator recorded.
        """
        was_ready = holds(self.status.conditions, "Ready")
        return self.seen.report.status is None and was_ready and self._lately

    @property
    def _lately(self) -> bool:
        """The controller has been silent for less than SILENCE_LIMIT_S."""
        silent = self.seen.report.silent_since_s
        return silent is not None and self.now.monotonic_s - silent < intents.SILENCE_LIMIT_S
