"""Cadence of checkpoints, by steps and by seconds."""

import time
from dataclasses import dataclass, field

from etude.common.api.run.checkpointing import Checkpointing


@dataclass(slots=True)
class CheckpointCadence:
    """Counts steps and seconds since the last checkpoint.

    It is queried several times between two steps and must give the same answer each time, so the
    clock is read once per step.
    """

    is_due: bool = False
    _tried_s: float = field(default_factory=time.monotonic)

    def count_step(self, checkpointing: Checkpointing, *, step: int, now_s: float) -> None:
        """Count a step.

        Args:
            checkpointing: current settings.
            step: steps done of the phase.
            now_s: on the monotonic clock.
        """
        steps, seconds = checkpointing.steps_between, checkpointing.every_seconds
        by_steps = steps is not None and not step % steps
        by_time = seconds is not None and now_s - self._tried_s >= seconds
        self.is_due = self.is_due or by_steps or by_time

    def restart(self, now_s: float) -> None:
        """Restart the cadence after a checkpoint, written or failed."""
        self.is_due = False
        self._tried_s = now_s
