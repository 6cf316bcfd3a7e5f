"""Classes of leases, by which a pool shares its slots."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model


class LeaseClassName(StrEnum):
    """Uses of a pool's environments."""

    TRAINING = "Training"
    EVALUATION = "Evaluation"
    GRADING = "Grading"
    SERVING = "Serving"


class LeaseClass(Model):
    """Share of one class of leases."""

    name: LeaseClassName
    """Training: rollouts of runs. Evaluation: rollouts that are only measured. Grading: hidden
    tests. Serving: sandboxes of the environment API."""
    weight: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Slot-seconds that it gets while others wait too, in proportion to theirs."""
    floor_slots: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """While it waits, it has this many slots before other classes get more. Environments of
    rollouts are paused for it, where the driver can."""
    headroom_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """Time for which the most that it had at once keeps slots of its floor free, with a third more:
    rollouts are paused ahead of need. 0 keeps none. Training and Evaluation keep none."""
