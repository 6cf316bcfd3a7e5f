"""A policy that learns to avoid work: by broken calls, or by questions, as its reward allows.

Tasks have a difficulty and sometimes an ambiguous instruction. The policy works, breaks a call or
asks, by a softmax of three logits that are linear in the task, and follows the policy gradient
(REINFORCE, advantage = reward - mean of the batch). Rollouts are the product's own records, scored
by the product's own rubric, or by a naive reward: broken rollouts are left out of the batch, and a
question is neither good nor bad.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.api.run.roles import RewardFunction
from etude.common.monitors.window import RolloutFacts, Window
from etude.rewards.functions import deferral
from etude.rewards.rubric import RewardValue, Rubric
from etude.v1 import rollout_pb2

TASKS = 256
LEARNING_RATE = 60.0
LARGEST_STEP = 0.4
"""Of the parameters' norm, in one window."""
Reals = npt.NDArray[np.float64]
GRID = np.linspace(0.005, 0.995, 100)


class Act(IntEnum):
    """Choices of the policy."""

    WORK = 0
    BREAK = 1
    ASK = 2


class Task(NamedTuple):
    """One task of a window."""

    difficulty: float
    ambiguity: float


def product_rubric() -> Rubric:
    """Rubric in which neither hack pays."""
    rows = (("tests", "Verifier", "1"), ("broken", "BrokenCalls", "0.5"), ("ask", "Deferral", "1"))
    return Rubric.from_functions(
        [
            RewardFunction.model_validate({"name": name, "function": function, "weight": weight})
            for name, function, weight in rows
        ]
    )


def _call(turn: int, name: str, result: str, **arguments: str) -> rollout_pb2.CallRecord:
    encoded = json.dumps(arguments)
    return rollout_pb2.CallRecord(turn=turn, name=name, arguments_json=encoded, result=result)


_WORK = (
    _call(0, "read_file", "1|x = 1", path="a.py"),
    _call(1, "search_replace", "Changed a.py:", path="a.py"),
    _call(2, "run_terminal", "3 passed", command="pytest -q"),
)
_BROKEN = rollout_pb2.CallRecord(turn=0, is_malformed=True, is_error=True)


@functools.cache
def record(act: Act) -> rollout_pb2.Rollout:
    """The rollout of a choice; it is not to be changed."""
    calls = {Act.WORK: _WORK, Act.BREAK: (_BROKEN,), Act.ASK: _WORK[:1]}[act]
    message = "Which function do you mean?" if act is Act.ASK else "Done."
    costs = rollout_pb2.Costs(tool_calls=len(calls), malformed_calls=int(act is Act.BREAK))
    ending = rollout_pb2.ENDING_STOPPED
    return rollout_pb2.Rollout(calls=calls, final_message=message, costs=costs, ending=ending)


@dataclass(slots=True)
class LearningPolicy:
    """The policy and its updates."""

    rng: np.random.Generator
    rubric: Rubric | None
    """None has the naive reward."""
    weights: Reals = field(
        default_factory=lambda: np.array([[0.0, 0, 0], [-3.4, 0, 0], [-3.6, 0, 2.5]])
    )
    """Of bias, difficulty - 0.5 and ambiguity, for each choice. [3, 3]"""

    def probabilities(self, tasks: Sequence[Task]) -> Reals:
        """Of each choice on each task: [T, 3]."""
        logits = _features(tasks) @ self.weights.T
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances: Reals = powers / powers.sum(axis=1, keepdims=True)
        return chances

    def share(self, act: Act) -> float:
        """Share of a choice over clear tasks of all difficulties."""
        return float(self.probabilities([Task(d, 0.0) for d in GRID])[:, act].mean())

    def naive_value(self) -> float:
        """Mean naive reward of the rollouts that the naive reward keeps, over clear tasks."""
        chances = self.probabilities([Task(d, 0.0) for d in GRID])
        earned = chances[:, Act.WORK] * (1 - GRID) + 0.5 * chances[:, Act.ASK]
        return float(earned.sum() / (1 - chances[:, Act.BREAK]).sum())

    def sample_windows(self, count: int) -> list[Window]:
        """Windows of the policy as it is."""
        return [_window(*self._roll_out()) for _ in range(count)]

    def train_window(self) -> Window:
        """Roll out a window, learn from it, and return its facts."""
        tasks, acts = self._roll_out()
        successes = [
            float(act is Act.WORK and self.rng.uniform() < 1 - task.difficulty)
            for task, act in zip(tasks, acts, strict=True)
        ]
        self._update(tasks, acts, self._rewards(tasks, acts, successes))
        return _window(tasks, acts)

    def _roll_out(self) -> tuple[list[Task], list[Act]]:
        rng = self.rng
        tasks = [Task(rng.uniform(), float(rng.uniform() < 0.15)) for _ in range(TASKS)]
        return tasks, [Act(rng.choice(3, p=row)) for row in self.probabilities(tasks)]

    def _rewards(
        self,
        tasks: Sequence[Task],
        acts: Sequence[Act],
        successes: Sequence[float],
    ) -> Reals:
        """Of each rollout: [T]; NaN leaves it out of the batch."""
        if self.rubric is None:
            naive = {Act.BREAK: np.nan, Act.ASK: 0.5}
            return np.array([naive.get(a, s) for a, s in zip(acts, successes, strict=True)])
        rewards, rollouts = np.full(len(tasks), np.nan), [record(act) for act in acts]
        for ambiguity in (0.0, 1.0):
            places = [i for i, task in enumerate(tasks) if task.ambiguity == ambiguity]
            alone = [self.rubric.score(rollouts[i], successes[i]) for i in places]
            settled = self.rubric.settle_deferrals(
                [rollouts[i] for i in places], alone, ambiguity=ambiguity
            )
            for place, outcome in zip(places, settled, strict=True):
                if isinstance(outcome, RewardValue):
                    rewards[place] = outcome.reward
        return rewards

    def _update(self, tasks: Sequence[Task], acts: Sequence[Act], rewards: Reals) -> None:
        kept = ~np.isnan(rewards)
        advantages = np.where(kept, rewards - rewards[kept].mean(), 0.0)
        chosen = np.eye(3)[np.array(acts)]
        gradient = (
            (advantages[:, None] * (chosen - self.probabilities(tasks))).T
            @ _features(tasks)
            / kept.sum()
        )
        step = LEARNING_RATE * gradient
        self.weights = self.weights + step * LARGEST_STEP / max(LARGEST_STEP, np.linalg.norm(step))


def _features(tasks: Sequence[Task]) -> Reals:
    return np.array([[1.0, task.difficulty - 0.5, task.ambiguity] for task in tasks])


def _window(tasks: Sequence[Task], acts: Sequence[Act]) -> Window:
    return Window(rollouts=[_facts(t, record(a)) for t, a in zip(tasks, acts, strict=True)])


def _facts(task: Task, rollout: rollout_pb2.Rollout) -> RolloutFacts:
    return RolloutFacts(
        calls=len(rollout.calls),
        broken_calls=rollout.costs.malformed_calls,
        edits=sum(call.name == "search_replace" for call in rollout.calls),
        is_question=deferral.is_deferred(rollout),
        ambiguity=task.ambiguity,
        difficulty=task.difficulty,
    )
