"""Arms of users: the channel whose engines serve each user of a route."""

from typing import NamedTuple

from etude.common.experiments.assignment import Arm, assign_arm
from etude.common.release.channels import CANARY, STABLE, ChannelExperiment


class ArmChoice(NamedTuple):
    """Arm of one user."""

    arm: str
    """`control` or `treatment` of an experiment; `stable` for a user who is in none."""
    channel: str
    """Channel whose engines serve the arm."""
    experiment: str = ""


def choose_arm(experiment: ChannelExperiment | None, tenant: str, user: str) -> ArmChoice:
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
