"""What the facts about a run are read from."""

from dataclasses import dataclass

from etude.common.api.kinds import RLRun
from etude.common.api.status import RLRunStatus
from etude.operator.actions import Moment
from etude.operator.conditions import Fact, holds
from etude.operator.runs import intents
from etude.operator.runs.quota import Quota
from etude.operator.runs.seen import Seen
from etude.v1 import run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that the facts are read from."""

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
        """Whether the active phase needs engines, environments and rewards."""
        active = self.status.active_phase or self.run.spec.phases[0].name
        return any(p.is_rl for p in self.run.spec.phases if p.name == active)

    @property
    def has_connection(self) -> bool:
        """Whether the controller reports, or did so until a moment ago."""
        return self.report is not None or (self.seen.report.status is not None and self._lately)

    @property
    def is_awaited(self) -> bool:
        """Whether this operator has not heard the controller yet, and another one just did.

        A new operator dials every run at once. Until it has had the time to, what only controllers
        can tell is what the last operator wrote down.
        """
        was_ready = holds(self.status.conditions, "Ready")
        return self.seen.report.status is None and was_ready and self._lately

    @property
    def _lately(self) -> bool:
        """Whether nobody has been silent for too long."""
        silent = self.seen.report.silent_since_s
        return silent is not None and self.now.monotonic_s - silent < intents.SILENCE_LIMIT_S
