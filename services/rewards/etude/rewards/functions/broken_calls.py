"""Penalty for malformed calls, which would otherwise be free in a successful rollout."""

from etude.common.api.run.rewards import BrokenCallsParameters
from etude.rewards.functions.base import Penalty
from etude.v1 import rollout_pb2


def penalty(
    rollout: rollout_pb2.Rollout, _parameters: BrokenCallsParameters, _success: float
) -> float:
    """1 if the rollout has a malformed call, else 0: more of them carry no information."""
    return 1.0 if rollout.costs.malformed_calls > 0 else 0.0


FUNCTION = Penalty(version="1", parameters=BrokenCallsParameters, penalty=penalty)
