"""Reward of a task of several steps, from those of its steps.

As Harbor has it (https://harborframework.com/docs/tasks/multi-step), but for steps that a limit of
the rollout kept from beginning: they count as 0, where Harbor leaves them out of the mean. A policy
could otherwise earn by spending its turns on the first step.
"""

from collections.abc import Sequence

from etude.common.harbor.task import HarborTask


def count_steps(task: HarborTask, rewards: Sequence[float]) -> int:
    """Number of steps that count: those up to the first below its own min_reward, with it."""
    for number, (step, reward) in enumerate(zip(task.steps, rewards, strict=False), 1):
        if reward < step.min_reward:
            return number
    return len(rewards)


def combine_rewards(task: HarborTask, rewards: Sequence[float]) -> float:
    """The reward of a task of several steps.

    Args:
        task: with steps.
        rewards: of the steps that were started, in order.

    Raises:
        ValueError: there are more rewards than steps.
    """
    if len(rewards) > len(task.steps):
        raise ValueError(f"{len(rewards)} rewards for {len(task.steps)} steps")
    counted = rewards[: count_steps(task, rewards)]
    is_ended = bool(counted) and counted[-1] < task.steps[len(counted) - 1].min_reward
    if task.takes_final:
        is_last = len(counted) == len(task.steps)
        return counted[-1] if is_ended or is_last else 0.0
    return sum(counted) / (len(counted) if is_ended else len(task.steps))
