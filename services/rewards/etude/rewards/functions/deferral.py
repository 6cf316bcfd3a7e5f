"""Reward of rollouts that ask instead of working: less than their siblings on a clear task."""

import re

from google.protobuf.message import DecodeError

from etude.agent import transcript
from etude.common.api.run.rewards import DeferralParameters
from etude.rewards.functions import unfinished
from etude.rewards.functions.base import RewardFunction
from etude.v1 import environments_pb2, rollout_pb2

_CACHES = re.compile(r"(?:^|/)(?:__pycache__|\.\w+_cache|node_modules)/|\.py[co]$")


def is_deferred(rollout: rollout_pb2.Rollout) -> bool:
    """True if the policy ended with a question and changed no file."""
    asks = unfinished.is_finished(rollout) and transcript.asks_question(rollout.final_message)
    return asks and not changes_files(rollout)


def deferred_reward(siblings_mean: float, *, cost: float, ambiguity: float) -> float:
    """Value of a question in place of success: `siblings_mean` - `cost` x (1 - `ambiguity`).

    Where `siblings_mean` is at most the mean reward of all siblings that do not ask, a question has
    an advantage of at most 0 in its group, and of 0 only if the instruction is ambiguous.
    """
    return siblings_mean - cost * (1 - ambiguity)


def changes_files(rollout: rollout_pb2.Rollout) -> bool:
    """True if the rollout edited a file, or left the workspace with more than caches of tools."""
    if rollout.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE:
        return True
    if any(map(transcript.edits, rollout.calls)):
        return True
    try:
        diff = environments_pb2.WorkspaceDiff.FromString(rollout.diff)
    except DecodeError:
        return True
    paths = [file.path for file in diff.written] + list(diff.deleted)
    return any(_CACHES.search(path) is None for path in paths)


FUNCTION = RewardFunction(version="2", parameters=DeferralParameters)
"""Its value depends on the siblings: the rubric settles it."""
