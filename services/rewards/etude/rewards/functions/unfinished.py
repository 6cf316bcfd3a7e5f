"""Penalty for rollouts that a limit ended, so that endless retries are not free."""

from etude.common.api.run.rewards import UnfinishedParameters
from etude.rewards.functions.base import Penalty
from etude.v1 import rollout_pb2


def is_finished(rollout: rollout_pb2.Rollout) -> bool:
    """True if the policy ended its work, not a limit."""
    return rollout.ending == rollout_pb2.ENDING_STOPPED


def penalty(
    rollout: rollout_pb2.Rollout, _parameters: UnfinishedParameters, _success: float
) -> float:
    """1 if a limit ended the rollout, else 0."""
    return 0.0 if is_finished(rollout) else 1.0


FUNCTION = Penalty(version="1", parameters=UnfinishedParameters, penalty=penalty)
