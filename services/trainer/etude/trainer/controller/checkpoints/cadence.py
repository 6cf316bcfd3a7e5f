"""Cadence of scheduled checkpoints, and the queue of on-demand requests with their backoff."""

import time
from dataclasses import dataclass, field

from etude.common.api.run.checkpointing import Checkpointing


def is_due_by_steps(checkpointing: Checkpointing, *, step: int) -> bool:
    """True if a checkpoint is due after a step because of its number alone."""
    steps = checkpointing.steps_between
    return steps is not None and not step % steps


@dataclass(slots=True)
class CheckpointCadence:
    """Counts steps and seconds since the last checkpoint.

    It is queried several times between two steps and must give the same answer each time, so the
    clock is read once per step.
    """

    is_due: bool = False
    _tried_s: float = field(default_factory=time.monotonic)

    def count_step(self, checkpointing: Checkpointing, *, step: int, now_s: float) -> None:
        """Count a step."""
        by_steps, seconds = is_due_by_steps(checkpointing, step=step), checkpointing.every_seconds
        by_time = seconds is not None and now_s - self._tried_s >= seconds
        self.is_due = self.is_due or by_steps or by_time

    def restart(self, now_s: float) -> None:
        """Restart the cadence after a checkpoint, written or failed."""
        self.is_due = False
        self._tried_s = now_s


REST = 9.0
"""Pause after a failed attempt, in multiples of its duration: at most 10 % go into attempts."""


LEAST_REST_S = 60.0


@dataclass(slots=True)
class CheckpointRequests:
    """UIDs of Checkpoint objects that wait for a checkpoint, oldest first.

    Such a checkpoint includes the model, so it may be the only one that cannot be written. A failed
    attempt is therefore followed by a pause, and gives way to a scheduled checkpoint if one is due.
    As with the cadence, the clock is read once per step.
    """

    _waiting: list[str] = field(default_factory=list)
    _fulfilled: set[str] = field(default_factory=set)
    _yields: bool = False
    """The newest attempt failed, and no other checkpoint was attempted since."""
    _rests: bool = False
    _rests_until_s: float = 0.0

    def add(self, request: str) -> None:
        """Add a request; a known one changes nothing."""
        if request not in self._waiting and request not in self._fulfilled:
            self._waiting.append(request)

    def next_request(self, *, is_due: bool) -> str:
        """The request to serve now; empty for none."""
        waits = self._rests or (self._yields and is_due)
        return self._waiting[0] if self._waiting and not waits else ""

    def count_step(self, now_s: float) -> None:
        """Count a step, at this time of the monotonic clock."""
        self._rests = now_s < self._rests_until_s

    def note_other_checkpoint(self) -> None:
        """Note an attempt at a checkpoint without a request."""
        self._yields = False

    def mark_fulfilled(self, request: str) -> None:
        """Mark a request as fulfilled; an empty one is ignored."""
        if not request:
            return
        self._waiting = [each for each in self._waiting if each != request]
        self._fulfilled.add(request)
        self._yields, self._rests, self._rests_until_s = False, False, 0.0

    def mark_failed(self, began_s: float, now_s: float) -> None:
        """Mark an attempt as failed, by its start and the current time of the monotonic clock."""
        self._yields = self._rests = True
        self._rests_until_s = now_s + max(LEAST_REST_S, REST * (now_s - began_s))
