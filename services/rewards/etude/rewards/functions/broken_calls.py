"""Penalty for calls that no tool could run: otherwise a free action while the rollout succeeds."""

from etude.v1 import rollout_pb2

VERSION = "1"


def penalty(rollout: rollout_pb2.Rollout) -> float:
    """1 for any malformed call, else 0: the first one derails a rollout, more say nothing new."""
    return 1.0 if rollout.costs.malformed_calls > 0 else 0.0
