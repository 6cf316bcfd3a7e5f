"""Faults that end an attempt at a rollout, and what they leave of it."""

import grpc

from etude.agent.replay import DivergedError
from etude.agent.turns import PlatformFaultError
from etude.common.errors import UnavailableError
from etude.trainer.rollouts.sandbox_client import EnvironmentLostError
from etude.trainer.rollouts.task_setup import SetupFailedError
from etude.v1 import rollout_pb2

FAULTS = (
    PlatformFaultError,
    UnavailableError,
    EnvironmentLostError,
    DivergedError,
    SetupFailedError,
    grpc.aio.AioRpcError,
)


def is_divergence(error: BaseException | None) -> bool:
    """True if repeated calls or prompts differed from those recorded."""
    while error is not None:
        if isinstance(error, DivergedError):
            return True
        error = error.__cause__
    return False


def may_spare_environment(error: Exception | None) -> bool:
    """True for a fault that may lie outside of the environment, as one of engines does.

    Args:
        error: that ended an attempt; None if its time was over.
    """
    return error is None or isinstance(error, PlatformFaultError)


def lost_rollout(fault: str) -> rollout_pb2.Rollout:
    """A rollout that a platform fault ended."""
    return rollout_pb2.Rollout(ending=rollout_pb2.ENDING_PLATFORM_FAULT, fault=fault)
