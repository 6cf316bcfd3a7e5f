"""Penalty for rollouts that a limit had to end: endless retries are not free."""

from etude.v1 import rollout_pb2

VERSION = "1"


def is_finished(rollout: rollout_pb2.Rollout) -> bool:
    """Whether the policy ended its work by itself."""
    return rollout.ending == rollout_pb2.ENDING_STOPPED


def penalty(rollout: rollout_pb2.Rollout) -> float:
    """1 unless the policy ended its work by itself."""
    return 0.0 if is_finished(rollout) else 1.0
