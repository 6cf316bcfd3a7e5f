"""Idle policy of guests: freeze after the last call, suspend to disk later. Pure."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimeouts:
    """Idle timeouts."""

    linger_s: float = 0.05
    """From the last call to the freeze: the next call of a turn comes sooner."""
    job_s: float = 60.0
    """From the last call to the freeze while a background command runs."""
    frozen_s: float = 60.0
    """From the freeze to the suspend to disk."""
    drift_s: float = 1.0
    """Clock lag above which the guest's clock is set on resume."""


class PowerState(Enum):
    """Power state of a guest."""

    RUNNING = "running"
    FREEZING = "freezing"
    FROZEN = "frozen"
    """In memory, without CPU time."""
    THAWING = "thawing"
    SAVING = "saving"
    SAVED = "saved"
    """On the disk only."""
    RESTORING = "restoring"
    ENDED = "ended"


TRANSITIONAL = frozenset(
    {PowerState.FREEZING, PowerState.THAWING, PowerState.SAVING, PowerState.RESTORING}
)
"""States between two others."""


class PowerStep(Enum):
    """Change of a guest's power state."""

    FREEZE = "freeze"
    THAW = "thaw"
    SAVE = "save"
    RESTORE = "restore"


class DueStep(NamedTuple):
    """Step that is due now, or the time until one is; neither: none until something happens."""

    step: PowerStep | None = None
    again_s: float | None = None
    """Seconds from now."""


class _Transition(NamedTuple):
    through: PowerState
    to: PowerState


_TRANSITIONS = {
    PowerStep.FREEZE: _Transition(PowerState.FREEZING, PowerState.FROZEN),
    PowerStep.THAW: _Transition(PowerState.THAWING, PowerState.RUNNING),
    PowerStep.SAVE: _Transition(PowerState.SAVING, PowerState.SAVED),
    PowerStep.RESTORE: _Transition(PowerState.RESTORING, PowerState.RUNNING),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """Idleness of a guest; each change makes a new value."""

    state: PowerState = PowerState.RUNNING
    num_calls: int = 0
    """Calls that run or wait for the guest."""
    num_jobs: int = 0
    last_call_s: float = 0.0
    """End of the last call, on any monotonic clock."""
    frozen_s: float = 0.0
    """Time of the last freeze or failed suspend."""
    stopped_s: float = 0.0
    """Time at which its clock stopped."""

    def begin_call(self) -> "Idleness":
        return replace(self, num_calls=self.num_calls + 1)

    def end_call(self, *, now_s: float) -> "Idleness":
        return replace(self, num_calls=self.num_calls - 1, last_call_s=now_s)

    def begin_step(self, step: PowerStep) -> "Idleness":
        return replace(self, state=_TRANSITIONS[step].through)

    def complete_step(self, step: PowerStep, *, now_s: float) -> "Idleness":
        after = replace(self, state=_TRANSITIONS[step].to)
        match step:
            case PowerStep.FREEZE:
                return replace(after, frozen_s=now_s, stopped_s=now_s)
            case PowerStep.THAW | PowerStep.RESTORE:
                # It has not run yet, even if its caller has gone.
                return replace(after, last_call_s=max(after.last_call_s, now_s))
            case PowerStep.SAVE:
                return after

    def fail_step(self, step: PowerStep, *, now_s: float) -> "Idleness":
        """Fail a step: in memory the guest is lost with its VMM, on disk it is not."""
        match step:
            case PowerStep.FREEZE | PowerStep.THAW:
                return replace(self, state=PowerState.ENDED)
            case PowerStep.SAVE:
                return replace(self, state=PowerState.FROZEN, frozen_s=now_s)
            case PowerStep.RESTORE:
                return replace(self, state=PowerState.SAVED)

    def next_step(self, patience: IdleTimeouts, *, now_s: float) -> DueStep:
        match self.state:
            case PowerState.RUNNING if self.num_calls == 0:
                limit_s = patience.job_s if self.num_jobs else patience.linger_s
                return _due_at(self.last_call_s + limit_s, PowerStep.FREEZE, now_s)
            case PowerState.FROZEN if self.num_calls > 0:
                return DueStep(step=PowerStep.THAW)
            case PowerState.FROZEN:
                return _due_at(self.frozen_s + patience.frozen_s, PowerStep.SAVE, now_s)
            case PowerState.SAVED if self.num_calls > 0:
                return DueStep(step=PowerStep.RESTORE)
            case PowerState.RUNNING | PowerState.SAVED | PowerState.ENDED:
                return DueStep()
            case (
                PowerState.FREEZING | PowerState.THAWING | PowerState.SAVING | PowerState.RESTORING
            ):
                return DueStep()


def _due_at(at_s: float, step: PowerStep, now_s: float) -> DueStep:
    # Compared as a difference: an instant that was computed twice may differ in its last bit.
    left_s = at_s - now_s
    return DueStep(step=step) if left_s <= 0 else DueStep(again_s=left_s)
