"""A small task of reinforcement learning on the real engine, with live and with replayed routers.

The policy goes on from a slice of a page; its reward is the share of its bytes that are vowels.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import Store
from etude.common.routed_experts import RouteDraft
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.inference.engine.interface import SampleRequest
from etude.trainer.algorithms.losses import k3_estimate
from etude.trainer.export.receipts import build_manifest
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import microbatch_losses
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch, Packing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.output_head import TokenScores

GROUPS, SIBLINGS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 8, 32, 48
VOWELS = np.frombuffer(b"aeiou", np.uint8)
PHASE = {
    "name": "vowels",
    "type": "ReinforcementLearning",
    "maxSteps": 100_000,
    "optimizer": {"learningRate": "2e-4"},
    "tasks": [{"name": "pages", "uri": "file:///tasks", "environment": "none"}],
    "algorithm": {"name": "DrGRPO", "parameters": {"lossScale": ANSWER_TOKENS}},
}


class Mismatch(NamedTuple):
    """Difference of the log-probs of engine and learner over the sampled tokens of a step."""

    p99: float
    kl: float
    """Estimate of KL(engine || learner) in nats per token (k3)."""


class StepFigures(NamedTuple):
    """One step of one arm: the same tokens by the same weights, routed in both ways."""

    reward: float
    p99_live: float
    p99_replayed: float
    kl_live: float
    kl_replayed: float


def open_learner(folder: Path, model: Path, *, seed: int = 0) -> Learner:
    """A learner of a model's folder, which publishes in bf16."""
    return Learner(
        LearnerConfig(
            run="bench",
            holder="bench",
            model_folder=model,
            seed=seed,
            storage=Storage(uri=(folder / "run").as_uri()),
            weights=Weights(dtype="BFloat16"),
            threads=2,
        )
    )


def publish(learner: Learner, store: Store, number: int) -> None:
    """Publish the learner's weights as a complete version."""
    version = VersionId(1, number)
    receipt = learner.encode(version, None)
    learner.upload(version)
    manifest = build_manifest(
        [receipt], run="bench", version=version, step=number, holder="bench", base=None
    )
    publication.publish_manifest(store, manifest)


async def sample(engine: Any, prompt: list[int], name: str, seed: int) -> PolicySequence:  # noqa: ANN401 - its module imports vLLM
    """One completion with the engine's log-probs and experts."""
    request = SampleRequest(
        request_id=name,
        prompt_token_ids=prompt,
        max_tokens=ANSWER_TOKENS,
        temperature=1.0,
        seed=seed,
        routes_from=0,
    )
    [chunk] = [chunk async for chunk in engine.generate(request)]
    draft = RouteDraft()
    draft.add(chunk.routes)
    tokens = np.array([*prompt, *chunk.token_ids], dtype=np.int32)
    rows = draft.pad_to(len(tokens))
    assert rows is not None  # noqa: S101 - the chunk has rows
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    logprobs[len(prompt) :] = chunk.logprobs
    return PolicySequence(
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        sampler_logprobs=logprobs,
        rollout=0,
        routes=rows.ids,
    )


async def sample_groups(
    engine: Any,  # noqa: ANN401 - its module imports vLLM
    pages: NDArray[np.int32],
    *,
    step: int,
    seed: int,
    name: str,
) -> PolicyBatch:
    """The rollouts of a step, siblings from one slice of a page each."""
    draw = np.random.default_rng([seed, step])
    starts = draw.integers(0, pages.size - PROMPT_TOKENS, GROUPS)
    prompts = [pages[start : start + PROMPT_TOKENS].tolist() for start in starts]
    sampled = await asyncio.gather(
        *(
            sample(engine, prompts[n // SIBLINGS], f"{name}-{n}", seed * 1_000_003 + n)
            for n in range(GROUPS * SIBLINGS)
        )
    )
    sequences = tuple(replace(each, rollout=number) for number, each in enumerate(sampled))
    rewards = [np.isin(each.token_ids[PROMPT_TOKENS:], VOWELS).mean() for each in sampled]
    return PolicyBatch(
        sequences=sequences,
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.repeat(np.arange(GROUPS), SIBLINGS),
        valid=np.ones(len(sequences), dtype=np.bool_),
    )


def without_routes(batch: PolicyBatch) -> PolicyBatch:
    """The batch, to be trained by live routers."""
    sequences = tuple(replace(each, routes=None) for each in batch.sequences)
    return replace(batch, sequences=sequences)


@torch.no_grad()
def measure_mismatch(learner: Learner, batch: PolicyBatch, *, replays: bool) -> Mismatch:
    """Mismatch of a batch by the learner's present weights."""
    rows = []
    for each in batch.sequences:
        places = np.flatnonzero(each.loss_mask)
        rows.append(
            TrainingRow(
                token_ids=each.token_ids,
                places=places,
                weights=np.ones(places.size, np.float32),
                sampler_logprobs=each.sampler_logprobs[places],
                routes=each.routes if replays else None,
            )
        )
    found: list[torch.Tensor] = []

    def record(scores: TokenScores, microbatch: Microbatch) -> torch.Tensor:
        found.append(scores.logprobs - microbatch.sampler_logprobs)
        return scores.logprobs.sum()

    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    packing = Packing(max_tokens=4_096)
    for _ in microbatch_losses(learner.policy, rows, record, ranks=alone, packing=packing):
        pass
    gap = torch.cat(found)
    return Mismatch(float(gap.abs().quantile(0.99)), float(k3_estimate(gap).mean()))


async def learn(  # noqa: PLR0913 - the parts of an arm
    engine: Any,  # noqa: ANN401 - its module imports vLLM
    follower: Any,  # noqa: ANN401 - as above
    learner: Learner,
    store: Store,
    pages: NDArray[np.int32],
    *,
    numbers: Sequence[int],
    seed: int,
    replays: bool,
) -> list[StepFigures]:
    """Train one arm, each step on rollouts of the version that the step before published.

    Args:
        engine: that samples.
        follower: of the engine.
        learner: with the weights to begin with.
        store: of the run.
        pages: that prompts are slices of.
        numbers: of the versions, one for each step.
        seed: of prompts and samples.
        replays: true if the learner takes the engine's experts.
    """
    learner.start_phase(PHASE, 0)
    found = []
    for step, number in enumerate(numbers):
        publish(learner, store, number)
        await follower.catch_up()
        batch = await sample_groups(engine, pages, step=step, seed=seed, name=f"{replays}-{step}")
        live, replayed = (measure_mismatch(learner, batch, replays=way) for way in (False, True))
        reward = float(batch.rewards.mean())
        found.append(StepFigures(reward, live.p99, replayed.p99, live.kl, replayed.kl))
        learner.policy_step(batch if replays else without_routes(batch))
    return found
