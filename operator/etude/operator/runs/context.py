"""Context of one pass over a run."""

from dataclasses import dataclass

from etude.common.api.kinds import RLRun
from etude.operator.actions import ClockReading
from etude.operator.builders.platform import Platform
from etude.operator.conditions import ConditionFact, is_condition_true
from etude.operator.reasons import Reason
from etude.operator.runs.capacity.kueue import QuotaState
from etude.operator.runs.lifecycle.limits import SILENCE_LIMIT_S
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Input of the decisions about a run and of its status conditions."""

    run: RLRun
    """For the conditions with its new status, in which they are not yet updated."""
    observed: ObservedRun
    now: ClockReading
    platform: Platform
    problem: ConditionFact | None
    """Problem of the run itself; its children are left alone until that is fixed."""
    is_running: bool
    """The run should hold pods."""
    quota: QuotaState | None = None
    """Quota state of a run that should hold pods; None for any other."""
    ending: ConditionFact | None = None
    """Complete or Failed, once the run is over."""

    @property
    def is_queued(self) -> bool:
        """The run waits for quota."""
        return self.quota is not None and not self.quota.allows_pods

    @property
    def release_reason(self) -> str | None:
        """The reason for which the run holds no pods on purpose; None if it should hold some."""
        if self.ending is not None:
            return Reason.FINISHED
        if self.quota is not None and self.is_queued:
            return self.quota.reason
        return None if self.is_running else Reason.SUSPENDED

    @property
    def is_resting(self) -> bool:
        """The run needs no children that do not exist yet."""
        return not (self.is_running or self.is_queued)

    @property
    def unaccepted(self) -> ConditionFact | None:
        """The problem of the run, else the rejection of its last decision."""
        return self.problem or self.observed.problem

    @property
    def report(self) -> run_pb2.RunStatus | None:
        """The newest report, if the controller is connected."""
        return self.observed.report.status if self.observed.report.is_connected else None

    @property
    def samples_now(self) -> bool:
        """The active phase needs engines, environments and rewards."""
        active = self.run.status.active_phase or self.run.spec.phases[0].name
        return any(p.is_rl for p in self.run.spec.phases if p.name == active)

    @property
    def has_connection(self) -> bool:
        """The controller reports, or did so within SILENCE_LIMIT_S."""
        heard_once = self.observed.report.status is not None
        return self.report is not None or (heard_once and self._is_recently_silent)

    @property
    def is_awaited(self) -> bool:
        """This operator has no report yet of a run that was Ready under the last operator.

        A new operator connects to every run when it starts. Until a report arrives, conditions that
        need one keep the value that the last operator recorded.
        """
        was_ready = is_condition_true(self.run.status.conditions, "Ready")
        return self.observed.report.status is None and was_ready and self._is_recently_silent

    @property
    def _is_recently_silent(self) -> bool:
        silent = self.observed.report.disconnected_since_s
        return silent is not None and self.now.monotonic_s - silent < SILENCE_LIMIT_S
