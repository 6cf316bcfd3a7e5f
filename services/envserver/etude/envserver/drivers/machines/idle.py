"""When a guest that nobody calls stands still, and when it leaves memory."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a guest is left as it is."""

    linger_s: float = 0.05
    """After the last call: the next one of a turn comes sooner than that."""
    job_s: float = 60.0
    """After the last call while a command runs in the background, as it does in production."""
    frozen_s: float = 60.0
    """Without a call, until it leaves memory."""
    drift_s: float = 1.0
    """How far its clock may be behind before it is set."""


class State(Enum):
    """What a guest does now."""

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
"""On its way from one to another."""


class Step(Enum):
    """What to do with a guest."""

    FREEZE = "freeze"
    THAW = "thaw"
    SAVE = "save"
    RESTORE = "restore"


class Due(NamedTuple):
    """What to do now, or when to ask again; neither: when something has happened."""

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
    """What is known of a guest's rest; each change makes another one."""

    state: State = State.RUNNING
    num_calls: int = 0
    """That run, or wait for the guest."""
    num_jobs: int = 0
    """Commands in its background."""
    quiet_s: float = 0.0
    """When the last call ended; on any clock that only goes forward."""
    frozen_s: float = 0.0
    """When it was stopped last, or could not be saved."""
    stopped_s: float = 0.0
    """When its clock stopped."""

    def called(self) -> "Idleness":
        """A call begins."""
        return replace(self, num_calls=self.num_calls + 1)

    def answered(self, *, now_s: float) -> "Idleness":
        """A call has ended, in whatever way."""
        return replace(self, num_calls=self.num_calls - 1, quiet_s=now_s)

    def begun(self, step: Step) -> "Idleness":
        """A step begins, which was due."""
        return replace(self, state=_WAYS[step].through)

    def done(self, step: Step, *, now_s: float) -> "Idleness":
        """A step has succeeded."""
        after = replace(self, state=_WAYS[step].to)
        match step:
            case Step.FREEZE:
                return replace(after, frozen_s=now_s, stopped_s=now_s)
            case Step.THAW | Step.RESTORE:
                # Even if whoever called it has gone: it has run for no time yet.
                return replace(after, quiet_s=max(after.quiet_s, now_s))
            case Step.SAVE:
                return after

    def failed(self, step: Step, *, now_s: float) -> "Idleness":
        """A step has failed: what is in memory is lost with its monitor, what is saved is not."""
        match step:
            case Step.FREEZE | Step.THAW:
                return replace(self, state=State.ENDED)
            case Step.SAVE:
                return replace(self, state=State.FROZEN, frozen_s=now_s)
            case Step.RESTORE:
                return replace(self, state=State.SAVED)

    def due(self, patience: Patience, *, now_s: float) -> Due:
        """What to do with the guest."""
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
