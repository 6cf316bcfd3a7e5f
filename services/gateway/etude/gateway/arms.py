"""Arms of users: the channel whose engines serve each user of a route."""

from typing import Annotated, NamedTuple

from pydantic import Field

from etude.common.api.meta import Model, Name
from etude.common.experiments.assignment import MAX_SHARE, Arm, assign_arm

STABLE = "stable"
CANARY = "canary"


class ArmChoice(NamedTuple):
    """Arm of one user."""

    arm: str
    """`control` or `treatment` of an experiment; `stable` for a user who is in none."""
    channel: str
    """Channel whose engines serve the arm."""
    experiment: str = ""


class RouteExperiment(Model):
    """Comparison of the canary channel with the stable one."""

    name: Name
    """Of the experiment."""
    salt: Annotated[str, Field(min_length=1, max_length=64)]
    """Makes the arms of experiments independent."""
    share: Annotated[int, Field(ge=0, le=MAX_SHARE)]
    """Users with the canary, in 10,000ths of all; as many are the control."""


def choose_arm(experiment: RouteExperiment | None, tenant: str, user: str) -> ArmChoice:
    """Choose the arm of an authenticated user."""
    if experiment is None:
        return ArmChoice(STABLE, STABLE)
    arm = assign_arm(
        experiment.name, experiment.salt, f"{tenant}/{user}" if tenant else user, experiment.share
    )
    if arm is None:
        return ArmChoice(STABLE, STABLE)
    channel = CANARY if arm is Arm.TREATMENT else STABLE
    return ArmChoice(arm.value, channel, experiment.name)
