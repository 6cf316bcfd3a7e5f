"""Idle policy of guests: freeze after the last call, suspend to disk later. Pure."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Idle timeouts."""

    linger_s: float = 0.05
    """From the last call to the freeze: the next call of a turn comes sooner."""
    job_s: float = 60.0
    """From the last call to the freeze while a background command runs."""
    frozen_s: float = 60.0
    """From the freeze to the suspend to disk."""
    drift_s: float = 1.0
    """Clock lag above which the guest's clock is set on resume."""


class State(Enum):
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


MOVING = frozenset({State.FREEZING, State.THAWING, State.SAVING, State.RESTORING})
"""States between two others."""


class Step(Enum):
    """Change of a guest's power state."""

    FREEZE = "freeze"
    THAW = "thaw"
    SAVE = "save"
    RESTORE = "restore"


class Due(NamedTuple):
    """Step that is due now, or the time until one is; neither: none until something happens."""

    step: Step | None = None
    again_s: float | None = None
    """Seconds from now."""


class _Way(NamedTuple):
    through: State
    to: State


_WAYS = {
    Step.FREEZE: _Way(State.FREEZING, State.FROZEN),
    Step.THAW: _Way(State.THAWING, State.RUNNING),
    Step.SAVE: _Way(State.SAVING, State.SAVED),
    Step.RESTORE: _Way(State.RESTORING, State.RUNNING),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """Idleness of a guest; each change makes a new value."""

    state: State = State.RUNNING
    num_calls: int = 0
    """Calls that run or wait for the guest."""
    num_jobs: int = 0
    """Background commands."""
    quiet_s: float = 0.0
    """End of the last call, on any monotonic clock."""
    frozen_s: float = 0.0
    """Time of the last freeze or failed suspend."""
    stopped_s: float = 0.0
    """Time at which its clock stopped."""

    def called(self) -> "Idleness":
        """Count a call that begins."""
        return replace(self, num_calls=self.num_calls + 1)

    def answered(self, *, now_s: float) -> "Idleness":
        """Count a call that has ended, in any way."""
        return replace(self, num_calls=self.num_calls - 1, quiet_s=now_s)

    def begun(self, step: Step) -> "Idleness":
        """Enter the transitional state of a step."""
        return replace(self, state=_WAYS[step].through)

    def done(self, step: Step, *, now_s: float) -> "Idleness":
        """Complete a step."""
        after = replace(self, state=_WAYS[step].to)
        match step:
            case Step.FREEZE:
                return replace(after, frozen_s=now_s, stopped_s=now_s)
            case Step.THAW | Step.RESTORE:
                # It has not run yet, even if its caller has gone.
                return replace(after, quiet_s=max(after.quiet_s, now_s))
            case Step.SAVE:
                return after

    def failed(self, step: Step, *, now_s: float) -> "Idleness":
        """Fail a step: in memory the guest is lost with its VMM, on disk it is not."""
        match step:
            case Step.FREEZE | Step.THAW:
                return replace(self, state=State.ENDED)
            case Step.SAVE:
                return replace(self, state=State.FROZEN, frozen_s=now_s)
            case Step.RESTORE:
                return replace(self, state=State.SAVED)

    def due(self, patience: Patience, *, now_s: float) -> Due:
        """Decide the next step."""
        match self.state:
            case State.RUNNING if self.num_calls == 0:
                limit_s = patience.job_s if self.num_jobs else patience.linger_s
                return _after(self.quiet_s + limit_s, Step.FREEZE, now_s)
            case State.FROZEN if self.num_calls > 0:
                return Due(step=Step.THAW)
            case State.FROZEN:
                return _after(self.frozen_s + patience.frozen_s, Step.SAVE, now_s)
            case State.SAVED if self.num_calls > 0:
                return Due(step=Step.RESTORE)
            case State.RUNNING | State.SAVED | State.ENDED:
                return Due()
            case State.FREEZING | State.THAWING | State.SAVING | State.RESTORING:
                return Due()


def _after(at_s: float, step: Step, now_s: float) -> Due:
    # Compared as a difference: an instant that was computed twice may differ in its last bit.
    left_s = at_s - now_s
    return Due(step=step) if left_s <= 0 else Due(again_s=left_s)
