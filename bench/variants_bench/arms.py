"""Reinforcement learning of one variant, on the real engine and learner in this process."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from etude.agent.chat import ChatFormat
from etude.agent.rollout_message import to_rollout_message
from etude.agent.trajectory import RolloutEnding, Trajectory
from etude.common import weights
from etude.common.api.run.rewards import LengthPenaltyParameters
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.rewards.functions.length_penalty import penalty
from etude.trainer.export.receipts import build_manifest
from etude.trainer.learner.batches import PolicyBatch, links_of
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from variants_bench import rollouts
from variants_bench.engine import FollowingEngine, build_engine
from variants_bench.puzzles import Puzzle, draw

PENALTY = LengthPenaltyParameters.model_validate(
    {"scale": 100, "onlyOnSuccess": True, "weights": {"toolOutputTokens": 0}}
)
PENALTY_WEIGHT = 0.2


class Arm(NamedTuple):
    """One variant."""

    name: str
    summaries: bool
    penalty: bool = False


ARMS = (
    Arm("one context", summaries=False),
    Arm("summaries", summaries=True),
    Arm("length penalty", summaries=True, penalty=True),
)


class Step(NamedTuple):
    """Figures of one step, over its rollouts."""

    score: float
    """Share of colour and animal that answers name."""
    success: float
    """Share of answers with both."""
    tokens: float
    """Sampled by a rollout."""
    tokens_per_success: float
    contexts: float
    summary_tokens: float
    cut: float
    """Share of rollouts that a limit ended."""
    entropy: float
    mismatch: float
    """Mean of |learner - engine| of a token's log-prob."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sizes of the reinforcement."""

    steps: int = 30
    prompts: int = 4
    siblings: int = 8
    learning_rate: str = "5e-4"


class Reinforcement:
    """An engine that follows a store, and the learners that publish to it one after the other."""

    def __init__(self, model: Path, folder: Path, recipe: Recipe, seed: int) -> None:
        self.model, self.folder, self.recipe, self.seed = model, folder, recipe, seed
        self.store = open_store(folder.as_uri())
        self.chat = ChatFormat.load(model)
        self._version = VersionId(1, 0)
        self._number = 0

    async def run(self, arms: Sequence[Arm]) -> Mapping[str, list[Step]]:
        """Train each variant from the same weights, on the same tasks."""
        weights.claim_epoch(self.store, holder="bench", parent=None, reason="start")
        engine = build_engine(
            self.model,
            self.store,
            self.folder / "scratch",
            most=self.recipe.prompts * self.recipe.siblings,
        )
        found: dict[str, list[Step]] = {}
        for arm in arms:
            learner = self._build_learner()
            steps = found[arm.name] = []
            for number in range(self.recipe.steps):
                steps.append(await self._step(arm, number, learner, engine))
                self._report(arm, number, steps[-1])
        return found

    def _report(self, arm: Arm, number: int, step: Step) -> None:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in step._asdict().items())
        print(f"seed {self.seed}, {arm.name}, step {number}: {figures}", file=sys.stderr)

    def _build_learner(self) -> Learner:
        learner = Learner(
            LearnerConfig(
                run="variants",
                holder="bench",
                model_folder=self.model,
                storage=Storage(uri=self.folder.as_uri()),
                weights=Weights(dtype="Float32"),
                micro_batch_tokens=4_096,
                threads=1,
            )
        )
        learner.start_phase(_phase(self.recipe), 0)
        return learner

    async def _step(self, arm: Arm, number: int, learner: Learner, engine: FollowingEngine) -> Step:
        """Publish, roll out, score and train."""
        started = time.perf_counter()
        self._publish(learner)
        await engine.catch_up()
        tasks = Random(f"{self.seed}-{number}")  # noqa: S311 - repeatable
        puzzles = [draw(tasks) for _ in range(self.recipe.prompts)]
        drawn = [each for each in puzzles for _ in range(self.recipe.siblings)]
        sampler = rollouts.ReplicaSampler(engine.replica, self.chat)
        base = (self.seed * 10_000 + number) * 1_000
        found = await asyncio.gather(
            *(
                rollouts.roll_out(
                    sampler, self.chat, puzzle, summaries=arm.summaries, seed=base + i
                )
                for i, puzzle in enumerate(drawn)
            )
        )
        return self._train(arm, learner, drawn, found, started)

    def _publish(self, learner: Learner) -> None:
        version = VersionId(1, self._number)
        receipt = learner.encode(version, None)
        learner.upload(version)
        manifest = build_manifest(
            [receipt], run="variants", version=version, step=0, holder="bench", base=None
        )
        publication.publish_manifest(self.store, manifest)
        self._version, self._number = version, self._number + 1

    def _train(
        self,
        arm: Arm,
        learner: Learner,
        drawn: Sequence[Puzzle],
        found: Sequence[Trajectory],
        started: float,
    ) -> Step:
        """Make one update of the rollouts' rewards."""
        rollouts_pb = [to_rollout_message(each) for each in found]
        scores = np.array(
            [
                puzzle.score(each.final_message) if each.ending is RolloutEnding.STOPPED else 0.0
                for puzzle, each in zip(drawn, found, strict=True)
            ]
        )
        successes = (scores == 1).astype(np.float64)
        rewards = scores.copy()
        if arm.penalty:
            rewards -= PENALTY_WEIGHT * np.array(
                [
                    penalty(each, PENALTY, success)
                    for each, success in zip(rollouts_pb, successes, strict=True)
                ]
            )
        result = learner.policy_step(
            PolicyBatch(
                sequences=tuple(
                    s
                    for i, each in enumerate(rollouts_pb)
                    for s in links_of(each, index=i, current={self._version})
                ),
                rewards=rewards,
                groups=np.repeat(np.arange(self.recipe.prompts), self.recipe.siblings),
                valid=np.ones(len(found), np.bool_),
            )
        )
        tokens = [each.costs.completion_tokens for each in found]
        return Step(
            score=float(scores.mean()),
            success=float(successes.mean()),
            tokens=float(np.mean(tokens)),
            tokens_per_success=float(np.sum(tokens) / max(1.0, successes.sum())),
            contexts=float(np.mean([len(each.links) for each in found])),
            summary_tokens=float(np.mean([each.costs.summary_tokens for each in found])),
            cut=float(np.mean([each.ending is not RolloutEnding.STOPPED for each in found])),
            entropy=result.entropy,
            mismatch=result.mismatch_mean,
            seconds=time.perf_counter() - started,
        )


def _phase(recipe: Recipe) -> dict[str, object]:
    return {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": recipe.steps,
        "optimizer": {
            "learningRate": recipe.learning_rate,
            "schedule": "Linear",
            "warmupSteps": 2,
            "finalFraction": "0.3",
        },
        "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
        "algorithm": {
            "name": "DrGRPO",
            "promptsPerStep": recipe.prompts,
            "groupSize": recipe.siblings,
            "parameters": {"clipLow": 0.2, "clipHigh": 0.28, "lossScale": 64},
        },
        "asyncLimits": {"mode": "Sync"},
        "rollout": {"maxTurns": rollouts.MAX_TURNS, "maxTokens": 4 * rollouts.CONTEXT},
    }
